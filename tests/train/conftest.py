"""A small configuration of the quickstart, and runs of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import rank_server  # noqa: F401
from training import ROOT, Training

QUICKSTART = ROOT / "examples" / "quickstart"

SMALL = """
base: {quickstart}
run: {{dir: {run}, max_restarts: 0}}
model: {{hf: {model}}}
data: {{train: [{{path: {data}/train.jsonl}}]}}
stages:
  - {{name: short, steps: 3, max_response_tokens: 40, prompts_per_step: 8, prompts_per_update: 8, group_size: 4}}
  - {{name: long, steps: 3, max_response_tokens: 64, prompts_per_step: 8, prompts_per_update: 4, group_size: 4}}
evaluate: {{data: [{{path: {data}/heldout.jsonl}}], every_steps: 3, samples: 2}}
# Several micro-batches, so that both pipeline stages have work; the trainer's state on the host while engines sample.
parallel: {{micro_batch_tokens: 256, offload: always, head: one_pass}}
algorithm: {{kl: {{coefficient: 0.01, reference: {model}}}, correction: {{mode: truncated}}}}
checkpoint: {{every_steps: 1, keep_last: 2, signal_grace_s: 600}}
track: {{console: plain}}
cluster: {{check_memory: false}} # other programs may hold what the tests run in
"""


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl (128 problems) and heldout.jsonl (16)."""
    folder = tmp_path_factory.mktemp("problems")
    command = [sys.executable, str(QUICKSTART / "task.py"), "--out", str(folder)]
    subprocess.run([*command, "--train", "128", "--held-out", "16", "--seed", "3"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def small_config(problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A function: run folder to the path of its configuration file."""
    folder = tmp_path_factory.mktemp("configs")

    def write(run: Path) -> Path:
        path = folder / f"{run.name}.yaml"
        path.write_text(
            SMALL.format(
                quickstart=QUICKSTART / "quickstart.yaml", run=run, model=QUICKSTART / "base_model", data=problems
            )
        )
        return path

    return write


@pytest.fixture
def train() -> Iterator[Callable[..., Training]]:
    """Start ``or1 train``; what a test leaves running is ended."""
    started: list[Training] = []

    def start(config: Path, *overrides: str, **options: Any) -> Training:
        started.append(Training(config, *overrides, **options))
        return started[-1]

    yield start
    for training in started:
        training.end()
