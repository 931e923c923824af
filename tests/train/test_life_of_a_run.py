"""One run of the whole trainer, stopped and damaged, and always resumed to its end.

Real Megatron on two ranks, two vLLM engines, Ray. Not proven here: that the model learns (the quickstart shows it),
GPUs, several nodes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from training import Training, checkpoint_steps, newest_checkpoint, read_rows

pytestmark = pytest.mark.timeout(3000)


def test_life_of_a_run(small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = small_config(run)

    # Pre-emption: save and exit.
    training = train(config, hold_after=2)
    training.wait_for_checkpoint(run, 2)
    training.process.send_signal(signal.SIGUSR1)
    status, output = training.finish()
    assert status == 128 + signal.SIGUSR1, output[-3000:]
    assert training.survivors() == []
    assert newest_checkpoint(run) >= 2

    # The newest checkpoint is damaged: to the end from the one before it, and on another layout.
    *_, before, stopped_at = checkpoint_steps(run)
    damaged = run / "checkpoints" / f"step_{stopped_at:06d}"
    file = max(damaged.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    training = train(config, "parallel.pipeline=1", "parallel.tensor=2")
    status, output = training.finish()
    assert status == 0, output[-3000:]
    assert f"{file} is corrupt" in output and f"Set aside as {damaged.name}.damaged" in output
    assert f"resumed from the checkpoint of step {before}" in output
    assert training.survivors() == []
    check_folder(run)

    # Once more: nothing to do.
    status, output = train(config).finish()
    assert status == 0
    assert "holds a finished run" in output


def check_folder(run: Path) -> None:
    """Expect each step once, no time twice, a summary, rollouts, checkpoints, a model that transformers loads."""
    rows = read_rows(run / "metrics.jsonl")
    steps = [row for row in rows if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        verbs = sum(
            value for name, value in row.items() if name.startswith("time/") and name not in ("time/step", "time/other")
        )
        assert 0 < verbs <= row["time/step"]  # between them, a loaded machine may run something else
    probes = [row["handoff/probe_max_abs_diff"] for row in steps if "handoff/probe_max_abs_diff" in row]
    assert len(probes) >= 5 and max(probes) < 1e-3  # a step in which a stop was asked for hands nothing off
    kl = [row["policy/kl"] for row in steps if "policy/kl" in row]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-5  # the reference is the start, and stays there
    assert all(row["correction/weight"] == pytest.approx(1, abs=1e-3) for row in steps if "correction/weight" in row)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 6 and summary["seed"] == 1
    assert 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    assert len(list((run / "rollouts").glob("step_*.parquet"))) == 6
    assert (run / "config.yaml").is_file()
    assert 1 <= len(checkpoint_steps(run)) <= 3
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(run / "hf").config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(run / "hf").chat_template
    report = [sys.executable, "-m", "or1_megatron.commands.app", "report", str(run), "--out", str(run / "page.html")]
    shown = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    assert "responses, " in shown and (run / "page.html").stat().st_size > 10_000
