"""The algorithm's options in the loop, on the riddle world of ``fakes``: what is scored, measured and handed on.

What these do not prove: anything of Megatron, or that an option makes for better training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_loop import STAGE, World, compare, ran, stopped_in

from or1_megatron.config.schema import AlgorithmConfig, CorrectionConfig, EntropyConfig, KLConfig, StageConfig
from or1_megatron.rl.objectives.dr_grpo import DrGRPO
from or1_megatron.rl.old_log_probs import score

OFF_POLICY = STAGE.model_copy(update={"prompts_per_step": 16, "prompts_per_update": 4})
"""N_SGD = 4."""


def test_entropy_of_kept_groups_alone(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(entropy=EntropyConfig(target=5.0, measured_on="kept"))
    world = ran(World(tmp_path, [STAGE.model_copy(update={"steps": 2})], evaluate_every=0, algorithm=algorithm))
    row, kept = world.diary.rows[2], world.diary.rolled[2][2]
    log_probs = np.concatenate([c.log_probs for g in kept for c in g.group.completions])
    assert (
        row["entropy/estimate"] == pytest.approx(-log_probs.mean(dtype=np.float64), rel=1e-6) != row["entropy/sampled"]
    )


def test_kl_pulls_back_to_the_reference(tmp_path: Path) -> None:
    """The reference is the policy's start, so that the KL begins at 0; it is scored once a step, on what is trained on;
    with beta 0 it is measured, and grows more than with beta 1."""
    grown = {}
    for beta in (0.0, 1.0):
        algorithm = AlgorithmConfig(kl=KLConfig(coefficient=beta, reference=Path("start")))
        world = ran(
            World(tmp_path / str(beta), [STAGE.model_copy(update={"steps": 8})], evaluate_every=0, algorithm=algorithm)
        )
        rows = world.diary.rows
        assert world.policy.calls.count("score_reference") == 8 and "score" not in world.policy.calls
        assert rows[1]["policy/kl"] == pytest.approx(0, abs=1e-12)
        grown[beta] = rows[8]["policy/kl"]
        (batch, objective), reference = world.policy.updates[-1], -np.log(8)
        assert objective.kl_coefficient == beta  # type: ignore[attr-defined]
        for row in (row for rank in batch.ranks for row in rank):
            assert row.reference_log_probs is not None
            np.testing.assert_allclose(row.reference_log_probs[row.loss_mask], reference, atol=1e-6)
    assert grown[0.0] > 3 * grown[1.0] > 0


def test_the_engines_log_probs_stay_beside_the_policys(tmp_path: Path) -> None:
    """With a correction, which compares the two, and without one."""
    for mode in ("off", "masked"):
        algorithm = AlgorithmConfig(correction=CorrectionConfig.model_validate({"mode": mode}))
        stage = OFF_POLICY.model_copy(update={"steps": 1})
        world = ran(World(tmp_path / mode, [stage], evaluate_every=0, algorithm=algorithm))
        rows = [row for batch, _ in world.policy.updates for rank in batch.ranks for row in rank]
        engines = np.concatenate(
            [row.engine_log_probs[row.loss_mask] for row in rows if row.engine_log_probs is not None]
        )
        sampled = [c.log_probs for g in world.diary.rolled[1][2] for c in g.group.completions]
        np.testing.assert_array_equal(np.sort(engines), np.sort(np.concatenate(sampled)))
        row = world.diary.rows[1]
        if mode == "off":
            assert "correction/weight" not in row
            continue
        assert row["correction/weight"] == pytest.approx(1, abs=1e-6) and row["correction/cut_fraction"] == 0


def test_stale_responses_keep_the_log_probs_of_the_weights_that_sampled_them(tmp_path: Path) -> None:
    """N_SGD = 4 and a policy that has moved on. Without correction rho compares with these, and no pass is made; with
    one, the policy's own come beside them."""
    world = World(tmp_path, [OFF_POLICY], evaluate_every=0)
    world.loop.start()
    world.loop.train_step()
    kept = world.diary.rolled[1][2]
    sampled = [c.log_probs for g in kept for c in g.group.completions]
    passes = world.policy.calls.count("score")
    for mode in ("off", "truncated"):
        algorithm = AlgorithmConfig(correction=CorrectionConfig.model_validate({"mode": mode}))
        scored = score(world.policy, kept, OFF_POLICY, algorithm, world.loop.config.layout, stale=True)
        samples = [sample for group in scored.samples for sample in group]
        assert world.policy.calls.count("score") == passes + (mode != "off")
        for sample, of_engine in zip(samples, sampled, strict=True):
            assert sample.engine_log_probs is of_engine
            assert (mode == "off") == (sample.policy_log_probs is None)
    own = [sample.policy_log_probs for sample in samples if sample.policy_log_probs is not None]
    assert any(abs(o - e).max() > 0.01 for o, e in zip(own, sampled, strict=True))


EVERYTHING = AlgorithmConfig.model_validate(
    {
        "loss": {"aggregation": "response_mean", "dual_clip": 3.0},
        "kl": {"coefficient": 0.01, "reference": "start"},
        "correction": {"mode": "masked"},
        "entropy": {"target": 5.0, "gate": "late", "measured_on": "kept"},
    }
)


@pytest.mark.parametrize("stop_at", [2, 3])
def test_resumed_with_every_option_on(tmp_path: Path, stop_at: int) -> None:
    stages = [OFF_POLICY]
    options: dict[str, Any] = {"evaluate_every": 0, "evaluated": False, "algorithm": EVERYTHING}
    whole = ran(World(tmp_path / "whole", stages, **options))
    first = stopped_in(World(tmp_path / "run", stages, **options), stop_at)
    assert not first.loop.finished
    second = ran(World(tmp_path / "run", stages, **options, diary=first.diary))
    assert second.loop.finished
    compare(second, whole)
    assert all(row.weights is not None for batch, _ in whole.policy.updates for rank in batch.ranks for row in rank)


@pytest.mark.parametrize(
    ("stage", "objective", "passes"),
    [
        (OFF_POLICY, {"name": "gspo"}, 5),  # pi_k's, and one before each SGD step
        (OFF_POLICY, {"name": "test_whole_batch:Centred"}, 5),
        (STAGE, {"name": "test_whole_batch:Centred"}, 1),
        (STAGE, {"name": "gspo"}, 0),  # pointwise on policy
    ],
)
def test_objectives_of_sequences_and_of_the_batch_learn(
    tmp_path: Path, stage: StageConfig, objective: dict[str, object], passes: int
) -> None:
    """With a one-pass head, in 14 steps; scored only where it must be."""
    aggregation = "response_mean" if objective["name"] == "gspo" else "token_mean"
    algorithm = AlgorithmConfig.model_validate({"objective": objective, "loss": {"aggregation": aggregation}})
    steps = [stage.model_copy(update={"steps": 14})]
    world = ran(World(tmp_path, steps, evaluate_every=0, algorithm=algorithm, changes={"one_pass": True}))
    trained = [row for step, row in world.diary.rows.items() if step and row["sgd/steps"] == stage.sgd_steps]
    assert len(trained) > 3 and world.policy.calls.count("score") >= passes * len(trained)
    assert (world.policy.calls.count("score") == 0) == (passes == 0)
    rows = world.diary.rows
    assert rows[14]["accuracy/all"] > rows[1]["accuracy/all"] + 0.2


def test_dr_grpo_takes_the_length_of_its_batch(tmp_path: Path) -> None:
    """length_share is T_k / (R T) of each SGD step's own mini-batch."""
    chosen = {"objective": {"name": "dr_grpo"}, "advantage": {"scale": "none"}}
    algorithm = AlgorithmConfig.model_validate(chosen)
    world = ran(World(tmp_path, [OFF_POLICY.model_copy(update={"steps": 2})], evaluate_every=0, algorithm=algorithm))
    longest = OFF_POLICY.max_response_tokens
    for batch, objective in world.policy.updates:
        assert isinstance(objective, DrGRPO)
        assert objective.length_share == pytest.approx(batch.token_count / (batch.sample_count * longest))
