"""Updates without a finite loss or gradient leave no trace; their dumps replay at other layouts than they were made at.

Dumped at TP2 with sequence parallelism by real Megatron on gloo; replayed by the command, in one process and at PP2.
Not proven here: bf16, GPUs, and that a dump of a large model fits the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from rich.console import Console

from or1_megatron.commands.replay import differ, repeat_update
from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, SafetyConfig
from or1_megatron.parallel.driver import PolicyDriver, policy_verbs
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import build_mesh
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.reference import FrozenReference
from or1_megatron.parallel.saver import CheckpointSaver
from or1_megatron.rl.batch import pack
from or1_megatron.rl.dump import DumpError, DumpStore, read_dump, write_dump
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.safety import SgdStep, UpdateGuard
from or1_megatron.runtime.heartbeat import Heartbeat
from or1_megatron.sizing.parallel_layouts import LayoutError, batch_layout
from or1_megatron.types import Batch, Sample, TokenScores, UpdateReport

SEEN = UpdateReport({"loss": 4.0}, 8, 2.0, 1e-6, False, 0.0, 0.0)
NOT_FINITE = replace(SEEN, sums={"loss": float("nan")}, grad_norm=float("inf"), skipped=True)
LOSS = ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.1, temperature=0.8, on_policy=False)


@dataclass(frozen=True)
class InfiniteLoss:
    """A loss that is reported infinite while every gradient is finite."""

    temperature: float = 0.8

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        loss = -log_probs.sum()
        return loss, {"loss": loss.detach() + math.inf}


@dataclass(frozen=True)
class InfiniteGradient:
    """A finite loss whose gradient is not: the square root at 0."""

    temperature: float = 0.8

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        loss = (log_probs * 0.0).abs().sqrt().sum()
        return loss, {"loss": loss.detach()}


def samples() -> list[Sample]:
    rng = np.random.default_rng(5)
    made = []
    for prompt, response in [(3, 9), (5, 14), (2, 6), (4, 17), (6, 11)]:
        made.append(
            Sample(
                prompt_ids=rng.integers(0, 61, prompt, dtype=np.int32),
                response_ids=rng.integers(0, 61, response, dtype=np.int32),
                engine_log_probs=rng.normal(-4.0, 0.3, response).astype(np.float32),
                advantage=float(np.float32(rng.normal())),
                loss_mask=np.ones(response, dtype=np.bool_),
            )
        )
    return made


def digest(policy: MegatronPolicy) -> str:
    """Digest this rank's parameters, fp32 master weights and optimizer state."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name in sorted(value, key=str):
                add(value[name])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    for network in policy.networks:
        add(dict(network.named_parameters()))
    for optimizer in policy.optimizer.chained_optimizers:
        inner = optimizer.optimizer
        add([group["params"] for group in inner.param_groups])
        add([inner.state[p] for group in inner.param_groups for p in group["params"] if p in inner.state])
    add(policy.sgd_steps)
    return found.hexdigest()


def bad_updates(everywhere: PolicyDriver, batch: Batch, poisoned: Batch, gather: Any) -> dict[str, Any]:
    """Make each kind of bad update after a good one, which makes optimizer state; return whether it left a trace."""
    scored = everywhere.score(batch, LOSS.temperature)
    good = everywhere.update(batch, LOSS)
    before = gather()
    seen = {}
    for name, told, objective in (
        ("loss", batch, InfiniteLoss()),
        ("gradient", batch, InfiniteGradient()),
        ("both", poisoned, LOSS),
    ):
        report = everywhere.update(told, objective)
        seen[name] = [report.skipped, str(report.sums["loss"]), str(report.grad_norm), gather() == before]
    again = everywhere.update(batch, LOSS)
    assert good.scores is not None
    of_update = [*good.scores.log_probs, *good.scores.entropies]
    apart = [
        float(np.abs(left - right).max())
        for left, right in zip([*scored.log_probs, *scored.entropies], of_update, strict=True)
    ]
    return {
        "good": good.skipped,
        "seen": seen,
        "again": again.skipped,
        "moved": gather() != before,
        "score and update apart": max(apart),
    }


def compare_reference(
    everywhere: PolicyDriver, batch: Batch, started: TokenScores, held_by_reference: Callable[[], int]
) -> dict[str, Any]:
    """Compare two scores of the frozen reference, after updates of the policy, with the policy before them."""

    def as_started(found: TokenScores) -> bool:
        pairs = zip([*found.log_probs, *found.entropies], [*started.log_probs, *started.entropies], strict=True)
        return all(np.array_equal(left, right) for left, right in pairs)

    def scored() -> TokenScores:
        return everywhere.score_reference(batch, 0.8)

    held = [held_by_reference()]
    exact = [as_started(scored()), as_started(scored())]
    held.append(held_by_reference())
    return {"exact": exact, "held_bytes": held, "policy moved": not as_started(everywhere.score(batch, 0.8))}


LAYOUTS = {
    "PP2 VPP2": ParallelConfig(ranks=2, pipeline=2, virtual_pipeline=2, micro_batch_tokens=64),
    "DP2": ParallelConfig(ranks=2, micro_batch_tokens=64),  # the poisoned sample is on one replica alone
    "CP2": ParallelConfig(ranks=2, context=2, head="one_pass", distributed_optimizer=False, micro_batch_tokens=64),
    "TP2 SP": ParallelConfig(ranks=2, tensor=2, sequence=True, micro_batch_tokens=64),
}
"""The updates at the last layout are dumped."""


def serve_or_lead(model: Path, layout: str, dumps: Path) -> dict[str, Any]:
    """Make bad updates at one layout; rank 0 returns the results, and dumps two updates at the last layout."""
    parallel, config = LAYOUTS[layout], ModelConfig(hf=model, dtype="float32")
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(config, parallel, OptimizerConfig(lr=1e-3), mesh)
    frozen = FrozenReference(config.hf, config.dtype, parallel, mesh, offload=True)

    def digests() -> list[str]:
        everyone: list[str] = [""] * mesh.world
        torch.distributed.all_gather_object(everyone, digest(policy), group=mesh.control)
        return everyone

    def held_by_reference() -> int:
        return sum(p.untyped_storage().nbytes() for chunk in frozen.chunks for p in chunk.parameters())

    saver = CheckpointSaver(policy, asynchronous=False)
    verbs = policy_verbs(policy, saver, frozen) | {"digests": digests, "held_by_reference": held_by_reference}
    lockstep = Lockstep(mesh, verbs, 60, Heartbeat(dumps.parent / "beats", f"rank {mesh.rank}"))
    if mesh.rank > 0:
        lockstep.serve()
        return {}
    rows = batch_layout(parallel, policy.hf)
    plain = samples()
    bad = [*plain[:3], replace(plain[3], advantage=math.inf), plain[4]]
    batch, poisoned = pack(plain, rows), pack(bad, rows)
    everywhere = PolicyDriver(lockstep, saver)
    started = everywhere.score(batch, 0.8)
    result = bad_updates(everywhere, batch, poisoned, lambda: lockstep.call("digests"))
    result["reference"] = compare_reference(everywhere, batch, started, lambda: lockstep.call("held_by_reference"))
    if layout == "TP2 SP":
        context = {"model": config.model_dump(mode="json"), "parallel": parallel.model_dump(mode="json")}
        told: list[str] = []
        guard = UpdateGuard(SafetyConfig(dump_steps=(7,)), everywhere, DumpStore(dumps, 2, context), told.append)  # type: ignore[arg-type]  # the three methods that it uses
        guard.update(SgdStep(7, 0, batch, LOSS))
        guard.update(SgdStep(8, 1, poisoned, LOSS))
        result["told"] = told
    lockstep.close()
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return (folder of the dumps, what rank 0 saw at each layout)."""
    dumps = tmp_path_factory.mktemp("replay") / "dumps"
    return dumps, {layout: ranks.call(serve_or_lead, 2, tiny_qwen2, layout, dumps)[0] for layout in LAYOUTS}


def replayed(dump: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "or1_megatron.commands.app", "replay", str(dump), *options],
        env={**os.environ, "PYTHONPATH": str(ranks.ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ranks.TIMEOUT_S,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_frozen_reference_stays_what_the_policy_was(layout: str, made: tuple[Path, Any]) -> None:
    """To the bit, at the policy's layout, while the policy moves on; between passes nothing of it is on the device."""
    seen = made[1][layout]["reference"]
    assert seen == {"exact": [True, True], "held_bytes": [0, 0], "policy moved": True}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_tells_what_a_score_before_it_would_have(layout: str, made: tuple[Path, Any]) -> None:
    """Log-prob and entropy of every token, sample by sample; at CP2 with the head that works tile by tile."""
    assert made[1][layout]["score and update apart"] < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_update_is_skipped_on_all_ranks_and_leaves_no_bit_changed(layout: str, made: tuple[Path, Any]) -> None:
    """An infinite loss with finite gradients, a finite loss with a gradient that is not, and an infinite advantage;
    at DP2 only one of the ranks sees that."""
    seen = made[1][layout]
    assert not seen["good"] and not seen["again"] and seen["moved"]
    assert {name: (skipped, unchanged) for name, (skipped, _, _, unchanged) in seen["seen"].items()} == {
        "loss": (True, True),
        "gradient": (True, True),
        "both": (True, True),
    }
    assert seen["seen"]["loss"][1] == "inf" and np.isfinite(float(seen["seen"]["loss"][2]))
    assert seen["seen"]["gradient"][1] == "0.0" and not np.isfinite(float(seen["seen"]["gradient"][2]))


def test_a_good_update_is_reproduced_at_a_pipeline(made: tuple[Path, Any], tmp_path: Path) -> None:
    dump = made[0] / "step_000007_update_0"
    status, output = replayed(dump, "--layout", "PP2", "--out", str(tmp_path / "found.json"))
    assert status == 0, output
    assert "reproduced: the same within 0.0001" in output and "not finite: 0" in output
    found, recorded = json.loads((tmp_path / "found.json").read_text()), read_dump(dump).report
    assert float(found["grad_norm"]) == pytest.approx(recorded.grad_norm, rel=1e-5)
    assert float(found["sums"]["entropy"]) == pytest.approx(recorded.sums["entropy"], rel=1e-5)
    assert found["log_prob_difference"] < 1e-5


@pytest.mark.slow
def test_with_other_weights_it_is_not_reproduced(made: tuple[Path, Any], tiny_qwen2: Path) -> None:
    """The model as it was before the updates that came first."""
    status, output = replayed(made[0] / "step_000007_update_0", "--model", str(tiny_qwen2))
    assert status == 1 and "not reproduced: gradient norm was" in output, output


@pytest.mark.slow
def test_a_dump_of_an_update_that_raised(made: tuple[Path, Any], tmp_path: Path) -> None:
    """It has no weights and no log-probs: the update is made on the model that is given, and goes through here."""
    made_dump, folder = read_dump(made[0] / "step_000007_update_0"), tmp_path / "raised"
    folder.mkdir()
    write_dump(folder, replace(made_dump, reason="raised", raised="RuntimeError: out of memory", log_probs=()))
    status, output = replayed(folder, "--model", str(made[0] / "step_000007_update_0" / "weights"))
    assert status == 1, output
    assert "not reproduced: in the run the update raised 'RuntimeError: out of memory', now it went through" in output


@pytest.mark.slow
def test_a_bad_update_is_reproduced_in_one_process(made: tuple[Path, Any]) -> None:
    """The sample with the infinite advantage: the loss is bad, no log-prob is."""
    dump = made[0] / "step_000008_update_1"
    status, output = replayed(dump)
    assert status == 0, output
    assert "reproduced: again not finite" in output and "log-prob that is not finite: 0" in output


def test_a_bad_update_is_dumped(made: tuple[Path, Any]) -> None:
    dump = made[0] / "step_000008_update_1"
    assert f"or1 replay {dump}" in made[1]["TP2 SP"]["told"][0]
    found = read_dump(dump)
    assert found.report.skipped and float("inf") in [sample.advantage for sample in found.samples]
    assert (dump / "weights" / "config.json").is_file()


def test_what_cannot_be_replayed_is_refused(made: tuple[Path, Any], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(made[0] / "step_000008_update_1", bare, ignore=shutil.ignore_patterns("weights"))
    with pytest.raises(DumpError, match=r"holds no weights.*as it was after step 7"):
        repeat_update(bare, "1", None, None, Console())
    with pytest.raises(LayoutError, match="layout 'TP3' cannot work"):
        repeat_update(made[0] / "step_000008_update_1", "TP3", None, None, Console())


def test_differ() -> None:
    """Loss 0.5 per token, to within 1e-4 of 1; norm 2, to within 1e-4 of itself."""
    near = replace(SEEN, sums={"loss": 4.0007}, grad_norm=2.00019)
    assert list(differ(SEEN, near, 1e-4)) == []
    assert len(list(differ(SEEN, replace(near, sums={"loss": 4.0009}), 1e-4))) == 1
    assert len(list(differ(SEEN, replace(near, grad_norm=2.00021), 1e-4))) == 1
    assert list(differ(NOT_FINITE, NOT_FINITE, 1e-4)) == []
    assert "now it was finite" in next(differ(NOT_FINITE, SEEN, 1e-4))
    assert len(list(differ(SEEN, NOT_FINITE, 1e-4))) == 3
