"""Trackers write what they are given, at once, and survive kills and full disks. Not proven here: W&B's server."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from ports import listen
from prometheus_client.parser import text_string_to_metric_families

from or1_megatron.config.schema import TrackConfig
from or1_megatron.runtime import trackers
from or1_megatron.runtime.files import DiskFullError, write_atomically
from or1_megatron.runtime.jsonl import JsonlWriter, read_rows
from or1_megatron.runtime.record import RunRecord
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.runtime.trackers import TensorBoardTracker, check_trackers, check_wandb
from or1_verify.errors import UserError


def test_jsonl_rows(tmp_path: Path) -> None:
    """Read by json.loads of the standard library: non-finite values are null."""
    path = tmp_path / "metrics.jsonl"
    rows = JsonlWriter(path)
    rows.write({"step": 1, "reward/mean": 0.5, "policy/grad_norm": float("nan")})
    assert json.loads(path.read_text()) == {"step": 1, "reward/mean": 0.5, "policy/grad_norm": None}  # before close
    rows.write({"step": 2, "reward/mean": float("inf")})
    rows.close()
    assert list(read_rows(path))[1] == {"step": 2, "reward/mean": None}


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ("", [1]),
        ('{"step": 2, "a": 0.', [1]),  # torn within
        ('{"step": 2}', [1, 2]),  # torn just before its newline: whole all the same
        ("12", [1]),  # JSON, but no object
        ("\x00" * 100_000, [1]),  # what a power cut leaves; longer than one read of the repair
    ],
)
def test_a_torn_last_line_is_repaired_on_opening(tmp_path: Path, tail: str, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + tail)
    assert [row["step"] for row in read_rows(path)] == kept  # readers need no repair
    rows = JsonlWriter(path)
    rows.write({"step": 3})
    rows.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*kept, 3]


ENDLESS = """
import sys
from pathlib import Path
from or1_megatron.runtime.jsonl import JsonlWriter
from or1_megatron.runtime.trackers import TensorBoardTracker
folder = Path(sys.argv[1])
rows, events = JsonlWriter(folder / "metrics.jsonl"), TensorBoardTracker(folder / "tb")
for step in range(10**9):
    metrics = {f"m/{i}": step + i for i in range(40)}
    rows.write({"step": step, **metrics})
    events.log(step, metrics)
    print(step, flush=True)
"""


def test_kill_while_writing_keeps_every_row_that_was_logged(tmp_path: Path) -> None:
    """kill -9 of an endless writer: the file holds every step whose log() returned, and at most one more."""
    writer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        for line in writer.stdout:
            if int(line) >= 200:
                break
    finally:
        writer.kill()
        rest = writer.stdout.read()
        writer.wait()
    logged = max([200, *map(int, rest.split())])
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert logged < len(steps) <= logged + 2
    assert max(tensorboard_scalars(tmp_path / "tb")["m/0"]) >= logged


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars of the folder's event files as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]
    }


def test_dev_full_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    rows = JsonlWriter(path)
    with pytest.raises(DiskFullError, match=r"disk is full: could not write metrics.*metrics\.jsonl"):
        rows.write({"step": 1})
    rows.close()


def test_a_disk_that_fills_up_keeps_what_was_there(tmp_path: Path) -> None:
    """A real full file system (a tmpfs of 16 KiB): whole rows stay, the torn one is cut off, and more space helps."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        write_atomically(small / "config.yaml", b"old", "the configuration")
        rows = JsonlWriter(small / "metrics.jsonl")
        with pytest.raises(DiskFullError, match=r"metrics\.jsonl"):
            for step in range(10_000):
                rows.write({"step": step, "a": step / 3})
        size = os.path.getsize(small / "metrics.jsonl")
        steps = [json.loads(line)["step"] for line in (small / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(len(steps))) and len(steps) > 50 and size < 16384

        with pytest.raises(DiskFullError, match=r"the configuration.*config\.yaml"):
            write_atomically(small / "config.yaml", b"n" * 8192, "the configuration")
        assert (small / "config.yaml").read_bytes() == b"old"
        assert not (small / "config.yaml.partial").exists()

        with pytest.raises(DiskFullError, match=r"TensorBoard events.*events\.out"):
            TensorBoardTracker(small / "tb").log(1, {f"m{i}": 1.0 for i in range(500)})

        subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
        rows.write({"step": len(steps), "a": 0.0})
        rows.close()
        assert [row["step"] for row in read_rows(small / "metrics.jsonl")] == list(range(len(steps) + 1))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


WANDB = """
class Run:
    id, step = "one", {step}
    def log(self, row, step): open({out!r}, "a").write(f"{{step}} {{row['a']}}\\n")
    def finish(self): pass
def init(**_): return Run()
"""


def refused(**track: str) -> str:
    with pytest.raises(UserError) as refusal:
        check_trackers(TrackConfig(**track))
    return str(refusal.value)


def test_wandb_is_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, which W&B's own folder of results is not, and a key: of the environment, or netrc's for the host.

    Not proven here: that a server takes the key.
    """
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "wandb").mkdir()
    assert re.match(r"track\.wandb_project: 'magic' .*wandb is not installed; .*`pip", refused(wandb_project="magic"))
    (tmp_path / "wandb" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert "no key for api.wandb.ai is known; it needs" in refused(wandb_project="magic")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    check_wandb("magic")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert "wandb.example" in refused(wandb_project="magic")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_wandb("magic")


@pytest.mark.parametrize(("there", "sent"), [(2, [2, 3]), (6, [])])
def test_wandb_gets_the_rows_that_a_killed_session_had_not_sent(
    there: int, sent: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in for wandb, whose server has the steps before ``there``; the run resumes behind step 3."""
    (tmp_path / "wandb.py").write_text(WANDB.format(step=there, out=str(tmp_path / "sent")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    run = RunFolder(tmp_path / "run")
    run.create()
    run.metrics.write_text("".join(json.dumps({"step": step, "a": 1.0}) + "\n" for step in range(5)))
    record = RunRecord(run, TrackConfig(tensorboard=False, wandb_project="magic"), {})
    record.resumed(3)
    record.log(4, {"a": 2.0})
    record.close()
    del sys.modules["wandb"]
    lines = (tmp_path / "sent").read_text().splitlines()
    assert lines == [*(f"{step} 1.0" for step in sent), "4 2.0"]
    assert ("W&B keeps the killed session's rows up to step 5" in caplog.text) == (there == 6)


MLFLOW = """
from types import SimpleNamespace as Named
params, rows = {}, []
def search_experiments(max_results): return []
def set_experiment(name): return Named(experiment_id=f"id of {name}")
def log_params(given, synchronous, run_id): params[run_id] = given
def log_metrics(metrics, step, synchronous, run_id): rows.extend((run_id, step, *each) for each in metrics.items())
class MlflowClient:
    def create_run(self, experiment, run_name): return Named(info=Named(run_id=f"{run_name} in {experiment}"))
    def get_metric_history(self, run, key): return [Named(step=row[1]) for row in rows if row[2] == key]
    def set_terminated(self, run): rows.append((run, 0, "ended", 0))
"""


def test_mlflow_has_the_configuration_and_each_row_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for mlflow, which takes no @ in names. The second session finds that step 1 was not sent. Not proven
    here: MLflow's own store."""
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, track = RunFolder(tmp_path / "run"), TrackConfig(tensorboard=False, mlflow_experiment="magic")
    run.create()
    for step in (0, 2):
        record = RunRecord(run, track, {"optimizer": {"lr": 1e-6, "betas": [0.9]}})
        record.resumed(step)
        record.log(step, {"time/step": 1.0 + step, "evaluation/pass@4": 0.5})
        record.close()
        with run.metrics.open("a") as metrics:
            metrics.write('{"step": 1, "time/step": 7.0}\n')
    stand_in, name = sys.modules["mlflow"], "run in id of magic"
    monkeypatch.delitem(sys.modules, "mlflow")
    assert stand_in.params == {name: {"optimizer.lr": "1e-06", "optimizer.betas.0": "0.9"}}
    rows = [row for row in stand_in.rows if not row[2].startswith("memory/")]
    first, last = ([("time/step", s, 1.0 + s), ("evaluation/pass_4", s, 0.5), ("ended", 0, 0)] for s in (0, 2))
    assert rows == [(name, step, key, value) for key, step, value in (*first, ("time/step", 1, 7.0), *last)]


OWN = """
import time
class Plain:
    def __init__(self, folder, config): self.file = (folder / config["name"]).open("a", buffering=1)
    def log(self, step, metrics):
        if step == 2: raise OSError("no route to host")
        self.file.write(f"{step} {metrics['a']}\\n")
    def close(self): self.file.write("closed\\n")
class Held(Plain):
    def log(self, step, metrics): time.sleep(3600)
"""


def test_a_tracker_by_path_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It misses the step at which it raises; one that hangs holds up neither a step nor, for long, the end."""
    (tmp_path / "own.py").write_text(OWN)
    run = RunFolder(tmp_path / "run")
    run.create()
    lost = "could not take step 2, which metrics.jsonl has: OSError: no route to host"
    for kind, patience_s, told in (("Plain", 60.0, lost), ("Held", 0.1, "has not taken its last rows within 0.1 s")):
        monkeypatch.setattr(trackers, "_CLOSING_S", patience_s)
        record = RunRecord(run, TrackConfig(tensorboard=False, tracker=f"{tmp_path}/own.py:{kind}"), {"name": "rows"})
        for step in (1, 2, 3):
            record.log(step, {"a": step / 2})
        record.close()
        assert told in caplog.text
        assert [row["step"] for row in read_rows(run.metrics)] == [1, 2, 3]
    assert (run.root / "rows").read_text().splitlines() == ["1 0.5", "3 1.5", "closed"]
    with pytest.raises(UserError, match=r"the tracker cannot begin: KeyError: 'name'"):
        RunRecord(run, TrackConfig(tracker=f"{tmp_path}/own.py:Plain"), {})


def test_what_is_no_tracker_is_refused_at_the_door_with_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # where nothing listens
    for path, why in {
        "own.py": "expected package.module:name or path/to/file.py:name",
        "own.py:Other": "KeyError: 'Other'",
        "string:Template": "too many positional arguments",
        "pathlib:Path": "has no attribute 'log'",
        "no.such.module:Plain": "No module named 'no'",
    }.items():
        mlflow, own = refused(tracker=path, mlflow_experiment="magic").splitlines()
        assert own.startswith(f"track.tracker: '{path}' cannot be used: ") and why in own
        assert mlflow.startswith("track.mlflow_experiment: 'magic' cannot be used: ConnectionRefusedError")


def test_prometheus_reads_the_newest_values() -> None:
    """By its own parser. A metric that a step lacks keeps its value; two names that Prometheus writes alike are one."""
    with listen() as taken:
        port = taken.getsockname()[1]
        for wrong in (port, 70_000):
            with pytest.raises(UserError, match=f"prometheus_port: '{wrong}' cannot be used: .*needs a free port"):
                check_trackers(TrackConfig(prometheus_port=wrong))
    tracker = check_trackers(TrackConfig(prometheus_port=port))["Prometheus"](Path("runs/one"), {})
    tracker.log(1, {"entropy/sampled": 0.5, "evaluation/pass@16": 0.75, "a b": 1.0})
    tracker.log(2, {"entropy/sampled": 0.25, "a/b": 2.0})
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    tracker.close()
    values = {name: [(sample.value, sample.labels["run"]) for sample in families[name].samples] for name in families}
    wanted = {"step": 2.0, "entropy_sampled": 0.25, "evaluation_pass_16": 0.75, "a_b": 2.0}
    assert values == {f"or1_{name}": [(value, "one")] for name, value in wanted.items()}
    assert families["or1_entropy_sampled"].documentation.endswith("(nats/token)")
