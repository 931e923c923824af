"""The objectives against numbers worked by hand and finite differences in float64. They say nothing of the kernel that
makes the log-probs."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from or1_megatron.rl.loss import ClippedPolicyLoss, CrossEntropy


def double(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def clipped(alpha: float = 0.0, on_policy: bool = False, high: float = 0.2) -> ClippedPolicyLoss:
    return ClippedPolicyLoss(0.2, high, alpha, temperature=1.0, on_policy=on_policy)


def test_docstring_example_and_its_gradient() -> None:
    """rho (1.5, 0.5, 1.1), A (2, -1, 1), H (1, 0, 2), alpha 0.1: loss -3.0; gradients (0, 0, -1.1) and -0.1."""
    old = double(-1.0, -2.0, -3.0)
    new = (old + double(1.5, 0.5, 1.1).log()).requires_grad_()
    entropies = double(1.0, 0.0, 2.0, grad=True)
    loss, sums = clipped(alpha=0.1)(new, entropies, old, double(2.0, -1.0, 1.0))
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
    loss, sums = clipped()(new, double(0.0), double(0.0), double(advantage))
    loss.backward()
    np.testing.assert_allclose(new.grad, [gradient], atol=1e-12)
    assert sums["clipped"].item() == counts


def test_clip_higher_opens_the_upper_side_alone() -> None:
    """rho 1.25 is clipped at 1.2 and free at 1.28; rho 0.75 with A < 0 is clipped either way."""
    old, advantages = double(0.0, 0.0), double(1.0, -1.0)
    new = double(math.log(1.25), math.log(0.75))
    assert clipped()(new, old, old, advantages)[1]["clipped"].item() == 2
    assert clipped(high=0.28)(new, old, old, advantages)[1]["clipped"].item() == 1


def formula(new: np.ndarray, entropies: np.ndarray, old: np.ndarray, advantages: np.ndarray) -> float:
    """Eq. 3.1 once more, without torch: low 0.2, high 0.28, alpha 0.01."""
    total = 0.0
    for n, h, o, a in zip(new, entropies, old, advantages, strict=True):
        rho = math.exp(n - o)
        total -= min(rho * a, min(max(rho, 0.8), 1.28) * a) + 0.01 * h
    return total


def test_gradient_against_finite_differences() -> None:
    rng = np.random.default_rng(0)
    new, entropies = rng.normal(-1, 0.3, 50), rng.uniform(0, 2, 50)
    old, advantages = new + rng.normal(0, 0.3, 50), rng.normal(0, 1, 50)
    x = torch.tensor(new, requires_grad=True)
    loss, _ = clipped(alpha=0.01, high=0.28)(x, *(torch.tensor(a) for a in (entropies, old, advantages)))
    loss.backward()
    assert loss.item() == pytest.approx(formula(new, entropies, old, advantages), rel=1e-12)
    h = 1e-6
    for i in range(50):
        step = np.eye(50)[i] * h
        slope = formula(new + step, entropies, old, advantages) - formula(new - step, entropies, old, advantages)
        assert x.grad is not None and x.grad[i].item() == pytest.approx(slope / (2 * h), abs=1e-6)


def test_on_policy_ratio_is_one_with_gradient() -> None:
    """Loss -sum A, gradient -A, nothing clipped, whatever the engine's log-probs are; these give the mismatch."""
    new = double(-1.0, -2.0, grad=True)
    loss, sums = clipped(on_policy=True)(new, double(0.0, 0.0), double(-1.5, 3.0), double(2.0, -1.0))
    loss.backward()
    assert loss.item() == -1.0
    np.testing.assert_array_equal(new.grad, [-2.0, 1.0])
    assert (sums["ratio"].item(), sums["clipped"].item()) == (2.0, 0.0)
    assert (sums["abs_log_ratio"].item(), sums["max_abs_log_ratio"].item()) == (5.5, 5.0)


def test_without_bonus_entropy_stays_out_of_the_graph() -> None:
    entropies = double(1.0, grad=True)
    loss, _ = clipped()(double(-1.0, grad=True), entropies, double(-1.0), double(1.0))
    loss.backward()
    assert entropies.grad is None


def test_monstrous_ratio_gives_finite_gradient() -> None:
    """exp(200) overflows fp32; behind a closed clip it must give 0, not 0 * inf."""
    new = torch.tensor([0.0, 0.0], requires_grad=True)
    old, advantages = torch.tensor([-200.0, -200.0]), torch.tensor([1.0, -1.0])
    loss, _ = clipped()(new, torch.zeros(2), old, advantages)
    loss.backward()
    assert torch.isfinite(loss) and new.grad is not None and torch.isfinite(new.grad).all()


@pytest.mark.parametrize("objective", [clipped(alpha=0.1), clipped(on_policy=True), CrossEntropy()])
def test_of_no_tokens_is_zero_and_pickles(objective: ClippedPolicyLoss | CrossEntropy) -> None:
    """A micro-batch of padding alone; and the way to the ranks."""
    assert pickle.loads(pickle.dumps(objective)) == objective
    empty = torch.zeros(0, requires_grad=True)
    loss, sums = objective(empty, torch.zeros(0), torch.zeros(0), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0 and all(value.item() == 0 for value in sums.values())


def test_cross_entropy() -> None:
    """Log-probs (-1, -2): loss 3, gradient -1 each; advantages and old log-probs have no say."""
    new = double(-1.0, -2.0, grad=True)
    loss, sums = CrossEntropy()(new, double(0.5, 0.25), double(9.0, 9.0), double(-7.0, 7.0))
    loss.backward()
    assert (loss.item(), sums["loss"].item(), sums["entropy"].item()) == (3.0, 3.0, 0.75)
    np.testing.assert_array_equal(new.grad, [-1.0, -1.0])
