"""A model that people know, SmolLM2-135M-Instruct: made from PyPI's package, converted, compared, trained.

Not proven here: that it learns (examples/real_model/README.md), and engines in bf16.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from training import read_rows

from or1_megatron.parallel.packed import PackedRotary
from or1_megatron.parallel.parity import measure_on_ranks
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.selftest.checks.layouts import beyond

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/real_model"
LAYOUTS = ["1", "TP3 SP", "PP2", "CP2"]
HEAD = 64
"""Rows of one head of q."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def python(*command: str | Path) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def or1(*command: str | Path) -> str:
    return python("-m", "or1_megatron.commands.app", *command)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    python(EXAMPLE / "make_model.py", "--out", folder)
    return folder


def test_it_is_converted_there_and_back(model: Path, tmp_path: Path) -> None:
    """Every file, byte for byte."""
    or1("convert", "hf-to-megatron", "--hf", model, "--out", tmp_path / "megatron")
    or1("convert", "megatron-to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "hf")
    first, back = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}
        for folder in (model, tmp_path / "hf")
    )
    assert first.items() <= back.items()


def rope_base(networks: list[Any]) -> None:
    """As with a base of 101,000 in the place of 100,000."""
    (rotary,) = (module for module in networks[0].modules() if isinstance(module, PackedRotary))
    rotary.inverse_frequency.mul_((100_000 / 101_000) ** (torch.arange(0, HEAD, 2) / HEAD))


def swapped_heads(networks: list[Any]) -> None:
    """Two heads of q, in the first layer."""
    weight = next(
        p for name, p in networks[0].named_parameters() if name.endswith("layers.0.self_attention.linear_qkv.weight")
    )
    weight.data[: 2 * HEAD] = torch.cat((weight.data[HEAD : 2 * HEAD], weight.data[:HEAD])).clone()


def dropped_norm(networks: list[Any]) -> None:
    """The last one's weight."""
    next(p for name, p in networks[0].named_parameters() if "final" in name and "norm" in name).data.fill_(1.0)


FAULTS: dict[str, Callable[[list[Any]], None]] = {
    "rope": rope_base,
    "heads": swapped_heads,
    "norm": dropped_norm,
}


def compared(task: dict[str, Any], faults: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return check-parity's rows of the task, and those of its first layout with each fault in the policy."""
    store, rank, _ = next(dist.rendezvous("env://"))
    rows = {"": list(measure_on_ranks(task, "right", store, rank))}
    made = MegatronPolicy.__init__
    for fault in faults:

        def with_fault(self: Any, *args: Any, _fault: str = fault, **settings: Any) -> None:
            made(self, *args, **settings)
            FAULTS[_fault](self.networks)

        MegatronPolicy.__init__ = with_fault  # type: ignore[method-assign]
        rows[fault] = list(measure_on_ranks({**task, "layouts": task["layouts"][:1]}, fault, store, rank))
    return rows


def test_its_layouts_equal_transformers_and_faults_are_found(model: Path) -> None:
    """Within what rounding explains, by a reference in float64."""
    task = {
        "sequences": 4,
        "longest": 24,
        "seed": 1,
        "model": {"hf": str(model), "dtype": "float32"},
        "layouts": LAYOUTS,
    }
    rows = ranks.call(compared, 3, task, list(FAULTS), joined=False)[0]
    assert [row["name"] for row in rows[""]] == LAYOUTS
    assert {row["name"]: list(beyond(row, "float32")) for row in rows[""]} == {name: [] for name in LAYOUTS}
    for fault in FAULTS:
        assert any("log-prob" in line for line in beyond(rows[fault][0], "float32")), fault


@pytest.mark.parametrize("lora", ["null", "{rank: 16}"])
def test_it_trains_two_steps(lora: str, model: Path, tmp_path: Path) -> None:
    python(EXAMPLE / "task.py", "--out", tmp_path / "data")
    places = {"run.dir": tmp_path / "run", "model.hf": model, "data.train": f"[{{path: {tmp_path}/data/train.jsonl}}]"}
    places |= {"evaluate.data": "[]", "evaluate.every_steps": 0, "stages.0.steps": 2, "cluster.check_memory": "false"}
    places |= {"model.lora": lora, "stages.0.prompts_per_step": 8, "stages.0.prompts_per_update": 8}
    or1("train", EXAMPLE / "real_model.yaml", *(f"--set={key}={value}" for key, value in places.items()))
    steps = [row for row in read_rows(tmp_path / "run/metrics.jsonl") if "reward/mean" in row]
    assert len(steps) == 2 and all(0 < row["reward/mean"] < 1 and row["groups/kept"] > 0 for row in steps)
    assert (tmp_path / "run/hf/config.json").is_file() and os.path.getsize(tmp_path / "run/hf/model.safetensors") > 5e8
