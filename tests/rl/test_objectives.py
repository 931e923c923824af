"""The objectives against numbers worked by hand and finite differences in float64. They say nothing of the kernel that
makes the log-probs."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from or1_megatron.config.schema import AlgorithmConfig, StageConfig
from or1_megatron.interfaces import TokenInputs
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.objectives.correction import correction_weights
from or1_megatron.rl.objectives.cross_entropy import CrossEntropy
from or1_megatron.rl.objectives.estimators import k3
from or1_megatron.rl.objectives.registry import make_objective


def told(old: torch.Tensor, advantages: torch.Tensor, **more: torch.Tensor) -> TokenInputs:
    """``old`` as the engine's log-probs, no scoring pass."""
    return TokenInputs(advantages, old, **more)


def double(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def clipped(alpha: float = 0.0, on_policy: bool = False, high: float = 0.2, **more: Any) -> ClippedPolicyLoss:
    return ClippedPolicyLoss(0.2, high, entropy_coefficient=alpha, temperature=1.0, on_policy=on_policy, **more)


def test_docstring_example_and_its_gradient() -> None:
    """rho (1.5, 0.5, 1.1), A (2, -1, 1), H (1, 0, 2), alpha 0.1: loss -3.0; gradients (0, 0, -1.1) and -0.1."""
    old = double(-1.0, -2.0, -3.0)
    new = (old + double(1.5, 0.5, 1.1).log()).requires_grad_()
    entropies = double(1.0, 0.0, 2.0, grad=True)
    loss, sums = clipped(alpha=0.1)(new, entropies, told(old, double(2.0, -1.0, 1.0)))
    loss.backward()
    assert loss.item() == pytest.approx(-3.0, abs=1e-12)
    np.testing.assert_allclose(new.grad, [0.0, 0.0, -1.1], atol=1e-12)
    np.testing.assert_allclose(entropies.grad, [-0.1] * 3, atol=1e-12)
    assert {name: sums[name].item() for name in ("policy_loss", "entropy", "ratio", "clipped")} == pytest.approx(
        {"policy_loss": -2.7, "entropy": 3.0, "ratio": 3.1, "clipped": 2.0}
    )
    differences = [math.log(1.5), math.log(0.5), math.log(1.1)]
    assert sums["abs_log_ratio"].item() == pytest.approx(sum(map(abs, differences)))
    assert sums["max_abs_log_ratio"].item() == pytest.approx(math.log(2))
    assert sums["approx_kl"].item() == pytest.approx(3.1 - 3 - sum(differences))
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient", "counts"),
    [(1.5, -1.0, 1.5, 0), (0.5, 1.0, -0.5, 0), (1.5, 1.0, 0.0, 1), (0.5, -1.0, 0.0, 1), (1.0, 2.0, -2.0, 0)],
)
def test_which_side_the_clip_closes(ratio: float, advantage: float, gradient: float, counts: int) -> None:
    """The clip only closes where moving on would pay: up for A > 0, down for A < 0. d loss / d log pi = -rho A."""
    new = double(math.log(ratio), grad=True)
    loss, sums = clipped()(new, double(0.0), told(double(0.0), double(advantage)))
    loss.backward()
    np.testing.assert_allclose(new.grad, [gradient], atol=1e-12)
    assert sums["clipped"].item() == counts


EVERYTHING: dict[str, Any] = {"dual_clip": 1.5, "kl_coefficient": 0.3, "correction_cap": 1.25}


def formula(new: list[float], entropies: list[float], told: TokenInputs, correction: str, bonus_on: str) -> float:
    """The loss once more, in plain Python: low 0.2, high 0.28, alpha 0.01, and ``EVERYTHING``."""
    total = 0.0
    columns = (told.advantages, told.engine_log_probs, told.policy_log_probs, told.reference_log_probs, told.weights)
    for n, h, a, engine, old, ref, omega in zip(
        new, entropies, *(column.tolist() for column in columns if column is not None), strict=True
    ):
        rho = math.exp(n - old)
        term = min(rho * a, min(max(rho, 0.8), 1.28) * a)
        shut = rho > 1.28 if a > 0 else rho < 0.8
        if a < 0 and term < 1.5 * a:
            term, shut = 1.5 * a, True
        w = math.exp(old - engine)
        if correction == "truncated":
            w = min(w, 1.25)
        elif correction == "masked":
            w = w if 0.8 <= w <= 1.25 else 0.0
        else:
            w = 1.0
        bonus = 0.01 * h if bonus_on == "all" or shut else 0.0
        total += omega * (-w * term - bonus + 0.3 * (math.exp(ref - n) - (ref - n) - 1))
    return total


@pytest.mark.parametrize("correction", ["off", "truncated", "masked"])
@pytest.mark.parametrize("bonus_on", ["all", "clipped"])
def test_all_switches_against_finite_differences(correction: Any, bonus_on: Any) -> None:
    """Loss and its gradient by log-prob and by entropy, of 60 tokens of which every branch gets some."""
    rng = np.random.default_rng(0)
    old = rng.normal(-1, 0.3, 60)
    new, entropies = old + rng.normal(0, 0.35, 60), rng.uniform(0, 2, 60)
    engine, reference, omega = old + rng.normal(0, 0.3, 60), old + rng.normal(0, 0.5, 60), rng.uniform(0.2, 2, 60)
    inputs = [torch.tensor(a) for a in (rng.normal(0, 1, 60), engine, old, reference, omega)]
    tokens = TokenInputs(*inputs)
    x, y = (torch.tensor(a, requires_grad=True) for a in (new, entropies))
    objective = clipped(0.01, high=0.28, correction=correction, bonus_on=bonus_on, **EVERYTHING)
    loss, sums = objective(x, y, tokens)
    loss.backward()

    def at(n: np.ndarray, h: np.ndarray) -> float:
        return formula(n.tolist(), h.tolist(), tokens, correction, bonus_on)

    assert loss.item() == pytest.approx(at(new, entropies), rel=1e-12)
    h = 1e-6
    for i, step in enumerate(np.eye(60) * h):
        slopes = (
            at(new + step, entropies) - at(new - step, entropies),
            at(new, entropies + step) - at(new, entropies - step),
        )
        assert x.grad is not None and y.grad is not None
        assert (x.grad[i].item(), y.grad[i].item()) == pytest.approx(
            (slopes[0] / (2 * h), slopes[1] / (2 * h)), abs=1e-6
        )
    assert all(sums[f"clipped_{side}"].item() > 0 for side in ("low", "high", "dual"))
    assert sums["clipped"].item() == sums["clipped_low"].item() + sums["clipped_high"].item()
    assert correction == "off" or 0 < sums["weight_cut"].item() < 60


def test_dual_clip_by_hand() -> None:
    """c = 3, A -1: rho 4 is held at -3 without gradient, rho 2 is free at -2; A +1, rho 4 is the upper clip's."""
    new = double(math.log(4), math.log(2), math.log(4), grad=True)
    inputs = told(double(0.0, 0.0, 0.0), double(-1.0, -1.0, 1.0))
    loss, sums = clipped(dual_clip=3.0)(new, double(0.0, 0.0, 0.0), inputs)
    loss.backward()
    assert loss.item() == pytest.approx(3 + 2 - 1.2)
    np.testing.assert_allclose(new.grad, [0, 2, 0], atol=1e-12)
    counts = {name: sums[f"clipped{name}"].item() for name in ("", "_low", "_high", "_dual")}
    assert counts == {"": 1, "_low": 0, "_high": 1, "_dual": 1}
    assert (sums["max_ratio"].item(), sums["max_inverse_ratio"].item()) == pytest.approx((4, 0.5))


def test_kl_to_the_reference_by_hand() -> None:
    """k3's docstring: log p = ln 1/2, log q = ln 1/4: 1/2 + ln 2 - 1, gradient 1 - 1/2; 0 and flat where p = q. At
    beta 0 it is measured and has no gradient."""
    new = double(math.log(0.5), -1.0, grad=True)
    assert k3(new, double(math.log(0.25), -1.0)).tolist() == pytest.approx([math.log(2) - 0.5, 0.0])
    inputs = told(new.detach(), double(0.0, 0.0), reference_log_probs=double(math.log(0.25), -1.0))
    for beta in (0.0, 0.2):
        new.grad = None
        loss, sums = clipped(on_policy=True, kl_coefficient=beta)(new, double(0.0, 0.0), inputs)
        loss.backward()
        assert sums["kl"].item() == pytest.approx(math.log(2) - 0.5)
        assert loss.item() == pytest.approx(beta * (math.log(2) - 0.5))
        np.testing.assert_allclose(new.grad, [beta / 2, 0], atol=1e-12)
    assert "kl" not in clipped()(new, double(0.0, 0.0), told(new.detach(), double(0.0, 0.0)))[1]


def test_correction_weights_by_hand() -> None:
    """Ratios 3, 1.5, 0.25 at cap 2: the docstring's."""
    ratios = double(3.0, 1.5, 0.25).log()
    found = {mode: correction_weights(ratios, double(0.0, 0.0, 0.0), mode, 2.0) for mode in ("truncated", "masked")}
    assert [found[mode][0].tolist() for mode in found] == [pytest.approx([2, 1.5, 0.25]), pytest.approx([0, 1.5, 0])]
    assert [found[mode][1].tolist() for mode in found] == [[True, False, False], [True, False, True]]


def test_correction_takes_the_policys_own_log_prob_when_on_policy() -> None:
    """pi_theta / pi_engine = 1.5 and 4 (cut at 2), without gradient of its own: d loss = -w A. KL and bonus keep their
    weight of 1."""
    engine = double(-2.0, -3.0)
    new = (engine + double(1.5, 4.0).log()).requires_grad_()
    objective = clipped(alpha=0.5, on_policy=True, correction="truncated")
    loss, sums = objective(new, double(1.0, 1.0), told(engine, double(2.0, -1.0)))
    loss.backward()
    assert loss.item() == pytest.approx(-(1.5 * 2 - 2 * 1) - 0.5 * 2)
    np.testing.assert_allclose(new.grad, [-3.0, 2.0], atol=1e-12)
    assert [sums[name].item() for name in ("weight", "max_weight", "weight_cut")] == pytest.approx([3.5, 2, 1])


def test_bonus_on_clipped_tokens_alone() -> None:
    """The docstring's example: the first two tokens are clipped, so the third, with H 2, gets none."""
    old = double(-1.0, -2.0, -3.0)
    new, entropies = old + double(1.5, 0.5, 1.1).log(), double(1.0, 0.5, 2.0, grad=True)
    loss, _ = clipped(alpha=0.1, bonus_on="clipped")(new, entropies, told(old, double(2.0, -1.0, 1.0)))
    loss.backward()
    assert loss.item() == pytest.approx(-2.7 - 0.15)
    np.testing.assert_allclose(entropies.grad, [-0.1, -0.1, 0.0])


def test_the_objective_of_a_step_is_the_configured_one() -> None:
    stage = StageConfig(
        name="s",
        steps=1,
        max_response_tokens=4,
        prompts_per_step=8,
        prompts_per_update=4,
        group_size=2,
        temperature=0.7,
    )
    algorithm = AlgorithmConfig.model_validate(
        {
            "loss": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0},
            "kl": {"coefficient": 0.02, "reference": "folder"},
            "correction": {"mode": "masked", "cap": 3.0},
            "entropy": {"bonus_on": "clipped"},
        }
    )
    expected = ClippedPolicyLoss(
        0.1,
        0.25,
        4.0,
        entropy_coefficient=0.004,
        temperature=0.7,
        on_policy=False,
        kl_coefficient=0.02,
        correction="masked",
        correction_cap=3.0,
        bonus_on="clipped",
    )
    assert make_objective(algorithm, stage, alpha=0.004, clip_high=0.25) == expected
    once = stage.model_copy(update={"prompts_per_update": 8})
    plain = make_objective(AlgorithmConfig(), once, alpha=0.0, clip_high=0.2)
    assert plain == ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.0, temperature=0.7, on_policy=True)
    # Sampled by older weights: rho is against theirs, unless a correction makes up for them.
    for settings, expected_on_policy in ((AlgorithmConfig(), False), (algorithm, True)):
        stale = make_objective(settings, once, 0.0, 0.2, stale=True)
        assert isinstance(stale, ClippedPolicyLoss) and stale.on_policy == expected_on_policy


def test_the_ratio_is_against_the_policy_that_was_scored_else_against_the_engine() -> None:
    """Log-probs -1: rho = e^1 against pi_k's -2 though the engine says -4; e^3 against the engine's alone; no side
    known: refused. A slice of the inputs has the same ones."""
    engine, policy, one = double(-9.0, -4.0), double(-9.0, -2.0), double(0.0, 1.0)
    cases = {1.0: TokenInputs(one, engine, policy), 3.0: TokenInputs(one, engine), -1.0: TokenInputs(one, None)}
    for exponent, tokens in cases.items():
        if exponent < 0:
            with pytest.raises(ValueError, match="neither policy_log_probs nor engine_log_probs"):
                clipped()(double(-1.0), double(0.0), tokens[1:])
            continue
        sums = clipped()(double(-1.0), double(0.0), tokens[1:])[1]
        assert sums["ratio"].item() == pytest.approx(math.exp(exponent))
        assert sums["max_abs_log_ratio"].item() == pytest.approx(exponent)
    with pytest.raises(ValueError, match="correction needs the engine's log-probs"):
        clipped(correction="masked")(double(-1.0), double(0.0), TokenInputs(one[1:], None, policy[1:]))


NO_TOKENS = TokenInputs(*(torch.zeros(0) for _ in range(5)))


def test_on_policy_ratio_is_one_with_gradient() -> None:
    """Loss -sum A, gradient -A, nothing clipped, whatever the engine's log-probs are; these give the mismatch."""
    new = double(-1.0, -2.0, grad=True)
    loss, sums = clipped(on_policy=True)(new, double(0.0, 0.0), told(double(-1.5, 3.0), double(2.0, -1.0)))
    loss.backward()
    assert loss.item() == -1.0
    np.testing.assert_array_equal(new.grad, [-2.0, 1.0])
    assert (sums["ratio"].item(), sums["clipped"].item()) == (2.0, 0.0)
    assert (sums["abs_log_ratio"].item(), sums["max_abs_log_ratio"].item()) == (5.5, 5.0)


def test_without_bonus_entropy_stays_out_of_the_graph() -> None:
    entropies = double(1.0, grad=True)
    loss, _ = clipped()(double(-1.0, grad=True), entropies, told(double(-1.0), double(1.0)))
    loss.backward()
    assert entropies.grad is None


def test_monstrous_ratio_gives_finite_gradient() -> None:
    """exp(200) overflows fp32; behind a closed clip it must give 0, not 0 * inf."""
    new = torch.tensor([0.0, 0.0], requires_grad=True)
    old, advantages = torch.tensor([-200.0, -200.0]), torch.tensor([1.0, -1.0])
    loss, _ = clipped()(new, torch.zeros(2), told(old, advantages))
    loss.backward()
    assert torch.isfinite(loss) and new.grad is not None and torch.isfinite(new.grad).all()


@pytest.mark.parametrize(
    "objective", [clipped(alpha=0.1), clipped(on_policy=True, correction="masked", **EVERYTHING), CrossEntropy()]
)
def test_of_no_tokens_is_zero_and_pickles(objective: ClippedPolicyLoss | CrossEntropy) -> None:
    """A micro-batch that is all padding; and pickling, as on the way to the ranks."""
    assert pickle.loads(pickle.dumps(objective)) == objective
    empty = torch.zeros(0, requires_grad=True)
    loss, sums = objective(empty, torch.zeros(0), NO_TOKENS)
    loss.backward()
    assert loss.item() == 0 and all(value.item() == 0 for value in sums.values())


def test_cross_entropy() -> None:
    """Log-probs (-1, -2): loss 3, gradient -1 each; advantages and the engine's log-probs do not matter."""
    new = double(-1.0, -2.0, grad=True)
    loss, sums = CrossEntropy()(new, double(0.5, 0.25), told(double(9.0, 9.0), double(-7.0, 7.0)))
    loss.backward()
    assert (loss.item(), sums["loss"].item(), sums["entropy"].item()) == (3.0, 3.0, 0.75)
    np.testing.assert_array_equal(new.grad, [-1.0, -1.0])
    weighted = told(new.detach(), new.detach(), weights=double(1.5, 0.5))
    assert CrossEntropy()(new, new, weighted)[0].item() == 2.5
