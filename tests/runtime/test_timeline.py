"""Tests what processes write to a run's timeline, the comparison of clocks, and what `or1 timeline` makes of them.

Not proven: several real nodes. Perfetto's own classes read the trace back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.handoff.transport import status_store
from or1_megatron.handoff.transport.status_store import compare_clocks, join_store, open_group, open_store
from or1_megatron.runtime.timeline import VARIABLE

S, AHEAD = 1_000_000_000, 5_000_000_000
RECORDS = """
import subprocess, sys, time
from or1_megatron.runtime.timeline import add, join, span
with span("before"): time.sleep(0.001)
join(sys.argv[1])
if sys.argv[1] == "rank 0": subprocess.run([sys.executable, sys.argv[0], "engine 0"], check=True)
with span("step", step=1) as seen:
    with span("wait", waits_for="engine 0"): time.sleep(0.01)
    add("too short to record", 0, 10_000)
    seen["tokens"] = 7
"""


def test_what_processes_record(tmp_path: Path) -> None:
    """A process and its child write all spans before their ends; what was before ``join`` is not recorded."""
    (tmp_path / "code.py").write_text(RECORDS)
    started_ns = time.time_ns()
    environment = {**os.environ, VARIABLE: str(tmp_path / "timeline")}
    subprocess.run([sys.executable, tmp_path / "code.py", "rank 0"], env=environment, check=True)
    for who in ("rank 0", "engine 0"):
        (file,) = (tmp_path / "timeline").glob(f"*-{who.replace(' ', '_')}-*")
        about, *rows = map(json.loads, file.read_text().splitlines())
        assert about["who"] == who and str(about["pid"]) in file.name
        inner, outer = (span for row in rows for span in row["spans"])
        assert (inner[0], inner[1], inner[4]) == ("wait", "MainThread", {"waits_for": "engine 0"})
        assert (outer[0], outer[1], outer[4]) == ("step", "MainThread", {"step": 1, "tokens": 7})
        assert started_ns < outer[2] <= inner[2] < inner[2] + S // 100 <= inner[3] <= outer[3] < time.time_ns()


def test_clocks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's clock is 5 s ahead, and rank 1 looks up to 3 ns late."""
    store = open_store("127.0.0.1", 60)
    clocks = {"rank_0": count(), "ahead_0": (AHEAD + n + n % 4 for n in count())}
    clock = SimpleNamespace(time_ns=lambda: next(clocks[threading.current_thread().name]))
    monkeypatch.setattr(status_store, "time", clock)
    with ThreadPoolExecutor(1, "rank") as first, ThreadPoolExecutor(1, "ahead") as second:
        group = first.submit(open_group, store, 0, 2, 60)
        other = second.submit(open_group, join_store("127.0.0.1", store.port, 60), 1, 2, 60)
        first.submit(compare_clocks, group.result(), 2)
        found = second.submit(compare_clocks, other.result(), 2).result()
    assert found == {"ahead_ns": AHEAD + 1, "within_ns": 3}


def test_a_step_as_picture_and_trace(tmp_path: Path) -> None:
    """Steps of 10 s from 100 s on; engine 0's host is 5 s ahead. A track's slices begin and end in turn."""
    command = partial(CliRunner().invoke, app)
    refused = command(["timeline", str(tmp_path)])
    assert refused.exit_code == 2 and "had no track.timeline, or an older version made it" in refused.output
    of_rank = [
        *(("step", "MainThread", 100, 110, {"step": 1}), ("step", "MainThread", 110, 120, {"step": 2})),
        *(("wait", "MainThread", 112, 113, {"waits_for": "rank 1"}), ("update", "MainThread", 112, 118, {})),
        ("write", "checkpoint", 109, 111, {}),
    ]
    of_engine = [
        ("clocks", "handoff", 95, 96, {"ahead_ns": AHEAD, "within_ns": 9}),
        ("decode", "engine 0", 114, 117, {"batch": 3}),
        ("verify", "engine 0", 116, 119, {}),  # overlaps, and is not inside
    ]
    (tmp_path / "timeline").mkdir()
    for host, who, spans in (("a", "rank 0", of_rank), ("b", "engine 0", of_engine)):
        rows = [(name, thread, start * S, end * S, args) for name, thread, start, end, args in spans]
        lines = [{"who": who, "host": host, "pid": 7}, {"spans": rows[:2]}, {"spans": rows[2:]}]
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"spans": [["torn", "Main'
        (tmp_path / "timeline" / f"{host}-{who}-7.jsonl").write_text(text)
    refused = command(["timeline", str(tmp_path), "--step", "3"])
    assert refused.exit_code == 2 and "no timeline of step 3; the steps that have ended are [1, 2]" in refused.output
    assert command(["timeline", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "timeline" / "step_000002.png").read_bytes().startswith(b"\x89PNG")

    trace = Trace.FromString((tmp_path / "timeline" / "step_000002.pftrace").read_bytes())
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    slices = []
    events = sorted((p.track_event.track_uuid, p.timestamp, i) for i, p in enumerate(trace.packet) if p.timestamp)
    for begin, end in zip(events[::2], events[1::2], strict=True):
        event = trace.packet[begin[2]].track_event
        assert begin[0] == end[0] and (event.type, trace.packet[end[2]].track_event.type) == (1, 2)  # begin, end
        owner = tracks[tracks[begin[0]].parent_uuid].process.process_name
        notes = {each.name: each.string_value for each in event.debug_annotations}
        slices.append((owner, tracks[begin[0]].name, event.name, begin[1] // S, end[1] // S, notes))
    assert sorted(slices, key=lambda each: each[:4]) == [
        ("engine 0 (b, pid 7)", "engine 0", "decode", 110, 112, {"batch": "3"}),
        ("engine 0 (b, pid 7)", "engine 0", "verify", 111, 114, {}),
        ("rank 0 (a, pid 7)", "MainThread", "step", 110, 120, {"step": "2"}),
        ("rank 0 (a, pid 7)", "MainThread", "update", 112, 118, {}),
        ("rank 0 (a, pid 7)", "MainThread", "wait", 112, 113, {"waits_for": "rank 1"}),
        ("rank 0 (a, pid 7)", "checkpoint", "write", 110, 111, {}),
    ]
