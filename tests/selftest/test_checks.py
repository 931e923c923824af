"""The checks' plans for any number of devices, the verdicts of a few, and the command's options.

Not proven here: a GPU's figures and branches beyond their plans; the whole run on CPU is test_whole.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.config.load import load_config
from or1_megatron.handoff.transport.choice import check_transport
from or1_megatron.runtime.versions import ROOT
from or1_megatron.selftest.known_checks import CHECKS, chosen
from or1_megatron.selftest.one_check import CheckedMachine, CheckOutcome, Context, lacking
from or1_megatron.selftest.setups import (
    SHAPES,
    handoff_config,
    layouts_for,
    placements_for,
    save_and_load_layouts,
    small_shape,
    training_run,
)
from or1_megatron.sizing.conflicts import layout_conflicts
from or1_megatron.sizing.parallel_layouts import parse_layout
from or1_megatron.weights.shape import Shape
from or1_verify.errors import UserError

GPUS = [1, 2, 3, 4, 5, 6, 7, 8]


def context_of(cuda: bool, devices: int) -> Context:
    given = Context(CheckOutcome("a check", "failed"))
    given.machine = CheckedMachine(cuda, devices, "")
    return given


def test_every_check_has_its_function() -> None:
    """Read: importing Megatron would alter this process."""
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        function = check.name.replace("-", "_")
        module = check.module or f"or1_megatron.selftest.checks.{function}"
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
        assert f"\ndef {function}(context: Context) -> None:" in source


def test_choice_by_name_and_what_a_machine_lacks() -> None:
    assert [check.name for check in chosen(("sandbox", "kernels"))] == ["kernels", "sandbox"]
    with pytest.raises(UserError, match="no check 'kernel'; there are: machine, devices,"):
        chosen(("kernel",))
    by_name = {check.name: check for check in CHECKS}
    cpu, one, two = context_of(False, 2), context_of(True, 1), context_of(True, 2)
    assert lacking(by_name["sleep"], cpu) == "there is no GPU"
    assert lacking(by_name["train-separate"], one) == "there is one device"
    assert lacking(by_name["train-separate"], two) == "" == lacking(by_name["handoff"], one)


def test_list() -> None:
    result = CliRunner().invoke(app, ["selftest", "--list"])
    assert result.exit_code == 0
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == [check.name for check in CHECKS]
    refused = CliRunner().invoke(app, ["selftest", "handof"])
    assert refused.exit_code == 2 and "no check 'handof'" in refused.stderr


@pytest.mark.parametrize("devices", GPUS)
def test_layouts_use_all_devices_and_suit_the_model(devices: int) -> None:
    """With 8 devices the axes TP, PP, CP and DP have (3 + 4 - 1 choose 3) = 20 products of three twos."""
    names = layouts_for(True, devices)
    assert len(set(names)) == len(names)
    kept = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 131072}
    hf = {**SHAPES[small_shape(cuda=True)], **kept}
    ranks = Counter()
    for name in (*names, *save_and_load_layouts(devices)):
        parallel = parse_layout(name, 256).parallel
        assert not list(layout_conflicts(parallel, Shape.of(hf))), name
        ranks[parallel.ranks] += 1
    assert max(ranks) == devices
    if devices == 8:
        assert sum(parse_layout(name, 256).parallel.ranks == 8 for name in names) == 20
    used = devices - devices % 2 if devices > 1 else 1
    assert {parse_layout(name, 256).parallel.ranks for name in save_and_load_layouts(devices)} == {used}


def test_layouts_on_cpu_cut_every_axis() -> None:
    parallel = [parse_layout(name, 256).parallel for name in layouts_for(False, 2)]
    for axis in ("tensor", "pipeline", "context"):
        assert {getattr(cut, axis) for cut in parallel} == {1, 2}, axis
    assert any(cut.ranks == 2 and cut.tensor * cut.pipeline * cut.context == 1 for cut in parallel)  # data
    assert set(layouts_for(False, 2)) < set(layouts_for(True, 2))


@pytest.mark.parametrize("devices", GPUS)
def test_handoffs_keep_to_the_devices(devices: int, tmp_path: Path) -> None:
    """Colocated engines share the trainer's GPUs; separate ones and the trainer fit beside each other; what the
    configuration would refuse is not tried."""
    placements = placements_for(True, devices)
    assert set(placements) == ({"colocated", "separate"} if devices > 1 else {"colocated"})
    for placement, (ranks, engines, transports) in placements.items():
        assert (ranks, engines) == (devices, devices) if placement == "colocated" else ranks + engines <= devices
        config = handoff_config(tmp_path / "model", placement, ranks, engines, cuda=True)
        for transport in transports:
            assert devices > 1 or "nccl" not in transport
            handoff = config.handoff.model_copy(update={"transport": transport})
            check_transport(config.model_copy(update={"handoff": handoff}), cuda=True)


@pytest.mark.parametrize("devices", GPUS)
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_training_plans_for_gpus(devices: int, placement: str, tmp_path: Path) -> None:
    """`or1 plan` for GPUs accepts what would be started, of 20 steps."""
    from or1_megatron.sizing.run_plan import plan_run

    if placement == "separate" and devices == 1:
        pytest.skip("needs two devices")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "heldout"):
        (data / f"{name}.jsonl").write_text("".join(f'{{"prompt": "1+{n}?", "answer": "2"}}\n' for n in range(128)))
    config = load_config(*training_run(CheckedMachine(True, devices, ""), placement, tmp_path / "run", data))
    plan_run(config, "cuda")
    assert config.total_steps == 20
    engines = config.rollout.engines * config.rollout.tensor_parallel
    assert config.parallel.ranks + (engines if placement == "separate" else 0) <= devices


def test_kernels_pass_and_a_wrong_head_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant adds 1e-3 to every log-prob of the recomputing head; the figures that see it are named."""
    from or1_megatron.selftest.checks import kernels

    given = context_of(False, 2)
    kernels.against_float64(given, "torch")
    assert given.outcome.figures and not given.outcome.wrong
    right = kernels.log_probs_and_entropies

    def wrong(*arguments: Any, **options: Any) -> Any:
        log_probs, entropies = right(*arguments, **options)
        return log_probs - 1e-3, entropies

    monkeypatch.setattr(kernels, "log_probs_and_entropies", wrong)
    kernels.against_float64(given, "torch")
    (first, *_) = given.outcome.wrong
    assert first.startswith("recompute, torch: log-prob and entropy, fp32, error / what rounding explains is ")
    assert not any(line.startswith("one_pass") for line in given.outcome.wrong)


@pytest.mark.parametrize(
    ("apart", "steps", "wrong"),
    [
        (5e-5, 5, []),
        (2e-3, 5, ["mean log-prob difference of sampled tokens, worst step is 0.002 nats, expected ≤ 0.0001 nats"]),
        (5e-5, 4, ["steps is 4, expected ≥ 5"]),
        (float("inf"), 5, ["every metric is finite is no, expected yes"]),
    ],
)
def test_training_is_judged_by_its_metrics(apart: float, steps: int, wrong: list[str], tmp_path: Path) -> None:
    """The first row of a run is of its start and has no step; the worst step counts."""
    from or1_megatron.selftest.checks.training import note

    rows: list[dict[str, float]] = [{"time/step": 9.0, "handoff/probe_max_abs_diff": 1e-6}]
    rows += [{"time/step": 1.0, "mismatch/mean_abs": 1e-5} for _ in range(steps - 1)]
    rows += [{"time/step": 3.0, "mismatch/mean_abs": apart}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text('{"finished": true, "accuracy_before": 0.5, "accuracy_after": null}')
    given = context_of(False, 2)
    note(given, tmp_path, 5, 1e-4)
    outcome = given.outcome
    assert set(wrong) <= set(outcome.wrong) and bool(wrong) == bool(outcome.wrong)
    assert outcome.figures["median step"]["value"] == 1.0 and "accuracy after" not in outcome.figures


def test_sandbox_that_confines_nothing_fails() -> None:
    """The tier "weak" runs programs with their user's rights to files; the check sees that."""
    from or1_megatron.selftest.checks.sandbox import one_tier
    from or1_verify.sandbox.limits import SandboxLimits
    from or1_verify.sandbox.program import SandboxUnavailable
    from or1_verify.sandbox.sandbox import Sandbox

    given = context_of(False, 2)
    try:
        with Sandbox(SandboxLimits(cpu_s=30.0, wall_s=60.0), "weak") as opened:
            one_tier(given, "weak", opened)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert given.outcome.wrong == ["weak: the host's files cannot be read is no, expected yes"]
