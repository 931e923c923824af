"""Shows one step of a run's timeline: as a picture with a row per process, and as a trace in Perfetto's format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from or1_megatron.report.figures.style import styled
from or1_megatron.runtime.jsonl import read_rows

Span = tuple[str, str, int, int, dict[str, Any]]  # name, thread, start and end in ns, arguments
Processes = Mapping[str, list[list[Span]]]
"""Each process's lanes. The spans of a lane are of one thread and do not overlap: nested spans have further lanes."""

_COLOURS: Final = {
    "forward_step": "#2b6cb0", "backward_step": "#7fb2e5", "optimizer": "#153e75", "decode": "#dd8a2b",
    "score_prompts": "#f6c177", "verify": "#38a169", "pack": "#b83280", "receive": "#ed64a6", "write": "#975a16",
    "other": "#8d99a6", "wait": "#e3e6ea",
}  # fmt: skip


def read_step(folder: Path, step: int | None) -> tuple[int, Processes]:
    """Read a step (None: the newest step) from a timeline folder; return (step, spans of all processes in the step).

    Times are by rank 0's clock. Spans are cut off at the step's start and end. Lines that cannot be read are left out.
    Raises ValueError if the folder has no timeline at all, or no timeline of this step.
    """
    files = sorted(folder.glob("*.jsonl"))
    steps, ahead_ns = dict[int, tuple[int, int]](), dict[str, int]()
    for about, spans in map(_read, files):
        for name, _, start_ns, end_ns, args in spans:
            if name == "step" and start_ns > steps.get(args["step"], (0, 0))[0]:
                steps[args["step"]] = start_ns, end_ns
            elif name == "clocks":
                ahead_ns[about["host"]] = args["ahead_ns"]
    if not files:
        raise ValueError(f"{folder} has no timeline: the run had no track.timeline, or an older version made it")
    step = max(steps, default=0) if step is None else step
    if step not in steps:
        raise ValueError(f"{folder} has no timeline of step {step}; the steps that have ended are {sorted(steps)}")
    processes = {}
    for about, spans in map(_read, files):
        if lanes := _lanes(spans, *steps[step], ahead_ns.get(about["host"], 0)):
            processes[f"{about['who']} ({about['host']}, pid {about['pid']})"] = lanes
    return step, processes


def _read(file: Path) -> tuple[dict[str, Any], Iterator[Span]]:
    """Return the first row of a timeline file, which describes the process, and the spans in the file."""
    rows = read_rows(file, bad_lines=[])
    return next(rows), (tuple(each) for row in rows for each in row.get("spans", ()))


def _lanes(spans: Iterator[Span], first_ns: int, last_ns: int, ahead_ns: int) -> list[list[Span]]:
    lanes: list[list[Span]] = []
    cut = ((n, t, max(a - ahead_ns, first_ns), min(b - ahead_ns, last_ns), args) for n, t, a, b, args in spans)
    inside = [span for span in cut if span[2] < span[3]]
    for span in sorted(inside, key=lambda span: (span[1] != "MainThread", span[1], span[2], -span[3])):
        fitting = (lane for lane in lanes if lane[-1][1] == span[1] and lane[-1][3] <= span[2])
        if (lane := next(fitting, None)) is None:
            lanes.append(lane := [])
        lane.append(span)
    return lanes


def perfetto_trace(processes: Processes) -> bytes:
    """Return a trace for ui.perfetto.dev. The lanes of a thread have the same name, so Perfetto draws one track."""
    packets, ids = list[dict[str, Any]](), itertools.count(1)
    for process, lanes in processes.items():
        owner = next(ids)  # also as pid: true pids may be equal on two nodes
        packets.append({"track_descriptor": {"uuid": owner, "process": {"pid": owner, "process_name": process}}})
        for lane in lanes:
            track = next(ids)
            packets.append({"track_descriptor": {"uuid": track, "parent_uuid": owner, "name": lane[0][1]}})
            for name, _, start_ns, end_ns, args in lane:
                notes = [{"name": key, "string_value": str(value)} for key, value in args.items() if value is not None]
                begin = {"type": "TYPE_SLICE_BEGIN", "name": name, "debug_annotations": notes}
                for at_ns, event in ((start_ns, begin), (end_ns, {"type": "TYPE_SLICE_END"})):
                    at = {"timestamp": at_ns, "trusted_packet_sequence_id": 1}
                    packets.append(at | {"track_event": {"track_uuid": track, **event}})
    return Trace(packet=packets).SerializeToString()


@styled
def draw_step(step: int, processes: Processes, path: Path) -> None:
    """Draw the step to the file ``path``: a row per process shows when it works and waits. Inner spans are drawn over
    outer spans. The first thread of a process has a thick bar, other threads have thin bars."""
    start_ns = min(span[2] for lanes in processes.values() for lane in lanes for span in lane)
    figure = Figure((12, 1.2 + 0.4 * len(processes)), layout="constrained")
    axes = figure.add_subplot(ylim=(len(processes), 0), title=f"step {step}", xlabel="seconds")
    for row, lanes in enumerate(processes.values()):
        for lane in lanes:
            bars = [((span[2] - start_ns) / 1e9, (span[3] - span[2]) / 1e9) for span in lane]
            fill = [_COLOURS.get("wait" if "waits_for" in span[4] else span[0], _COLOURS["other"]) for span in lane]
            place = (row + 0.1, 0.6) if lane[0][1] == lanes[0][0][1] else (row + 0.74, 0.16)
            axes.broken_barh(bars, place, facecolors=fill, linewidth=0)
    axes.set_yticks([row + 0.4 for row in range(len(processes))], [name.partition(" (")[0] for name in processes])
    for kind, colour in _COLOURS.items():
        axes.bar(0, 0, 0, color=colour, label=kind)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
