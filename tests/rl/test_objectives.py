"""Each objective against numbers worked by hand and a float64 implementation in plain Python, written from its paper.

The gradients are compared with finite differences of that implementation. Nothing here says how an objective is spread
over ranks (``test_whole_batch``, ``parallel/test_parity``), what makes the log-probs, or whether an objective helps.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from or1_megatron.config.schema import AlgorithmConfig, StageConfig
from or1_megatron.interfaces import Sequences, TokenInputs
from or1_megatron.rl.objectives.cispo import CISPO
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.objectives.dapo import DAPO
from or1_megatron.rl.objectives.dr_grpo import DrGRPO
from or1_megatron.rl.objectives.estimators import correction_weights, kl_estimate
from or1_megatron.rl.objectives.gspo import GSPO
from or1_megatron.rl.objectives.registry import make_objective

LENGTHS = (9, 1, 14, 6, 11, 4)
COMMON: dict[str, Any] = {"entropy_coefficient": 0.0, "temperature": 1.0, "on_policy": False}
ON_POLICY: dict[str, Any] = {**COMMON, "on_policy": True}
LN2 = math.log(2)

Array = np.ndarray[Any, np.dtype[np.float64]]


def double(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def sequences(lengths: Sequence[int]) -> Sequences:
    sizes = torch.tensor(lengths)
    return Sequences(torch.arange(len(lengths)).repeat_interleave(sizes), sizes)


def tokens_of(old: torch.Tensor, advantages: torch.Tensor, **more: torch.Tensor) -> TokenInputs:
    """One sequence; ``old`` as the engine's log-probs, and no scoring pass."""
    return TokenInputs(advantages, old, sequences=sequences([len(old)]), **more)


def clipped(alpha: float = 0.0, on_policy: bool = False, **more: Any) -> ClippedPolicyLoss:
    return ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=alpha, temperature=1.0, on_policy=on_policy, **more)


def test_docstring_example_and_its_gradient() -> None:
    """rho (1.5, 0.5, 1.1), A (2, -1, 1), H (1, 0, 2), alpha 0.1: loss -3.0; gradients (0, 0, -1.1) and -0.1."""
    old = double(-1.0, -2.0, -3.0)
    new = (old + double(1.5, 0.5, 1.1).log()).requires_grad_()
    entropies = double(1.0, 0.0, 2.0, grad=True)
    loss, sums = clipped(alpha=0.1)(new, entropies, tokens_of(old, double(2.0, -1.0, 1.0)))
    loss.backward()
    assert loss.item() == pytest.approx(-3.0, abs=1e-12)
    np.testing.assert_allclose(new.grad, [0.0, 0.0, -1.1], atol=1e-12)
    np.testing.assert_allclose(entropies.grad, [-0.1] * 3, atol=1e-12)
    differences = [math.log(1.5), math.log(0.5), math.log(1.1)]
    expected = {
        "policy_loss": -2.7,
        "entropy": 3.0,
        "ratio": 3.1,
        "clipped": 2.0,
        "abs_log_ratio": sum(map(abs, differences)),
        "max_abs_log_ratio": LN2,
        "approx_kl": 3.1 - 3 - sum(differences),
    }
    assert {name: sums[name].item() for name in expected} == pytest.approx(expected)
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize(
    ("objective", "log_probs", "ratios", "advantages", "loss", "gradient", "sums"),
    [
        # The clip only closes where moving on would pay: up for A > 0, down for A < 0. d loss / d log pi = -rho A.
        (clipped(), [0] * 5, [1.5, 0.5, 1.5, 0.5, 1], [-1, 1, 1, -1, 2],
         -1.4, [1.5, -0.5, 0, 0, -2], {"clipped": 2}),
        # c = 3, A -1: rho 4 is held at -3 without gradient, rho 2 is free at -2; A +1, rho 4 is the upper clip's.
        (clipped(dual_clip=3.0), [0] * 3, [4, 2, 4], [-1, -1, 1],
         3.8, [0, 2, 0],
         {"clipped_low": 0, "clipped_high": 1, "clipped_dual": 1, "max_ratio": 4, "max_inverse_ratio": 0.5}),
        # On policy rho is 1, nothing is clipped, whatever the engine's log-probs are; these give the mismatch.
        (clipped(on_policy=True), [-1, -2], [math.exp(0.5), math.exp(-5)], [2, -1],
         -1.0, [-2, 1], {"ratio": 2, "clipped": 0, "abs_log_ratio": 5.5, "max_abs_log_ratio": 5}),
        # pi_theta / pi_engine = 1.5 and 4 (cut at 2), without gradient of its own: d loss = -w A.
        (clipped(on_policy=True, correction="truncated"), [-1, -2], [1.5, 4], [2, -1],
         -1.0, [-3, 2], {"weight": 3.5, "weight_square": 6.25, "max_weight": 2, "weight_cut": 1}),
        # From here on the docstrings' figures. rho 1.5 and 1.2 at A 2 are clipped as a sequence; 1.1 and 1.0 are not.
        (GSPO(0.2, 0.2, **COMMON), [0, 0], [1.5, 1.2], [2, 2], -4.8, [0, 0], {"clipped": 2}),
        (GSPO(0.2, 0.2, **COMMON), [0, 0], [1.1, 1], [2, 2], -4 * 1.1**0.5, [-2 * 1.1**0.5] * 2, {"clipped": 0}),
        # With w 2 and 1 by token, s is still of the sequence, so each gradient is the mean, 1.5.
        (GSPO(0.2, 0.2, correction="truncated", correction_cap=9.0, **ON_POLICY), [-1, -2], [2, 1], [1, 1],
         -3.0, [-1.5, -1.5], {}),
        # rho 1.5 weighs 1.2, rho 0.5 is free below; log pi has the gradient.
        (CISPO(1.0, 0.2, **COMMON), [-1, -2], [1.5, 0.5], [2, -1],
         1.4, [-2.4, 0.5], {"clipped_high": 1, "clipped_low": 0}),
        # Responses of 1 and 3 tokens, L 8: 1/16 after the policy's division by 4 tokens.
        (DrGRPO(0.2, 0.2, length_share=4 / 16, **COMMON), [0] * 4, [1] * 4, [2, -1, -1, -1],
         4 / 16, [-0.5, 0.25, 0.25, 0.25], {"loss": 4 / 16, "policy_loss": 4 / 16}),
        # rho 1.25 is open at a high of 0.28, 1.4 is not, nor 0.7 at A < 0.
        (DAPO(0.2, 0.28, **COMMON), [0] * 3, [1.25, 1.4, 0.7], [2, 2, -1], -4.26, [-2.5, 0, 0], {}),
    ],
)  # fmt: skip
def test_by_hand(
    objective: Any,
    log_probs: list[float],
    ratios: list[float],
    advantages: list[float],
    loss: float,
    gradient: list[float],
    sums: dict[str, float],
) -> None:
    """Loss, its gradient by log pi, and what is reported, of a few tokens of one response."""
    new = double(*log_probs, grad=True)
    total, named = objective(
        new, torch.zeros_like(new), tokens_of(new.detach() - double(*ratios).log(), double(*advantages))
    )
    total.backward()
    assert total.item() == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(new.grad, gradient, atol=1e-12)
    assert {name: named[name].item() for name in sums} == pytest.approx(sums)


class Drawn:
    """Random tokens of six responses, as numpy arrays."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        count = sum(LENGTHS)
        self.index = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        self.old = rng.normal(-1.2, 0.5, count)
        self.new = self.old + rng.normal(0, 0.35, count)
        self.advantages = rng.normal(0, 1, len(LENGTHS))[self.index]
        self.engine = self.old + rng.normal(0, 0.2, count)
        self.reference = self.old + rng.normal(0, 0.4, count)
        self.omega = rng.uniform(0.5, 1.5, count)
        self.entropies = rng.uniform(0, 2, count)

    def inputs(self) -> TokenInputs:
        columns = (self.advantages, self.engine, self.old, self.reference, self.omega)
        return TokenInputs(*(torch.tensor(column) for column in columns), sequences=sequences(LENGTHS))


Formula = Callable[[Drawn, Array], float]


def clipped_formula(
    low: float = 0.2,
    high: float = 0.2,
    by_sequence: bool = False,
    dual: float = math.inf,
    correction: str = "off",
    level: str = "token",
    cap: float = 2.0,
    floor: float | None = None,
    beta: float = 0.0,
    estimator: str = "k3",
    kl_cap: float = math.inf,
    alpha: float = 0.0,
    scale: float = 1.0,
) -> Formula:
    """The losses that clip a ratio, token by token: of PPO (with dual clip: 1912.09729), or of GSPO (2507.18071, eq. 5
    and 7) ``by_sequence``; with TIS and IcePop (2510.18855) of tokens, sequences and geometric means."""

    def loss(drawn: Drawn, new: Array) -> float:
        total = 0.0
        for t in range(len(new)):
            own, a = drawn.index == drawn.index[t], float(drawn.advantages[t])
            moved, off = new - drawn.old, drawn.old - drawn.engine
            rho = math.exp(moved[own].mean() if by_sequence else moved[t])
            term = min(rho * a, min(max(rho, 1 - low), 1 + high) * a)
            term = max(term, dual * a) if a < 0 else term
            w = math.exp({"token": off[t], "sequence": off[own].sum(), "geometric": off[own].mean()}[level])
            kept = w if (floor or 1 / cap) <= w <= cap else 0.0
            w = {"off": 1.0, "truncated": min(w, cap), "masked": kept}[correction]
            d = new[t] - drawn.reference[t]
            kl = min({"k2": d**2 / 2, "k3": math.exp(-d) - 1 + d}[estimator], kl_cap)
            total += drawn.omega[t] * (-w * term - alpha * drawn.entropies[t] + beta * kl)
        return scale * total

    return loss


def cispo_formula(drawn: Drawn, new: Array) -> float:
    """arXiv 2506.13585, eq. 4 and 5; the weight is a constant, so the formula keeps it at the present log-probs."""
    weight = np.clip(np.exp(drawn.new - drawn.old), 1 - 0.9, 1 + 0.25)
    return -float((drawn.omega * weight * drawn.advantages * new).sum())


def switched(correction: Any) -> tuple[ClippedPolicyLoss, Formula, list[str]]:
    """Everything at once, with a correction of tokens."""
    options: dict[str, Any] = {"dual_clip": 1.3, "kl_coefficient": 0.3, "correction_cap": 1.25}
    made = ClippedPolicyLoss(
        0.2, 0.28, entropy_coefficient=0.01, temperature=1.0, on_policy=False, correction=correction, **options
    )
    formula = clipped_formula(high=0.28, dual=1.3, alpha=0.01, beta=0.3, correction=correction, cap=1.25)
    acts = ["clipped_low", "clipped_high", "clipped_dual"] + ["weight_cut"] * (correction != "off")
    return made, formula, acts


def corrected(mode: Any, level: Any, floor: float | None) -> tuple[ClippedPolicyLoss, Formula, list[str]]:
    cap = {"token": 1.2, "sequence": 1.5, "geometric": 1.05}[level]
    options: dict[str, Any] = {"correction_cap": cap, "correction_floor": floor, "correction_level": level}
    made = clipped(correction=mode, **options)
    assert made.scope == ("token" if level == "token" else "sequence")
    return made, clipped_formula(correction=mode, level=level, cap=cap, floor=floor), ["weight_cut"]


COUNT = sum(LENGTHS)
CASES: dict[str, tuple[Any, Formula, list[str]]] = {
    "dapo": (DAPO(0.2, 0.28, **COMMON), clipped_formula(high=0.28), ["clipped"]),
    # 2503.20783: without 1 / |o_i|, over a constant of 20 and six responses; the policy divides by the count.
    "dr_grpo": (
        *(DrGRPO(0.2, 0.28, length_share=COUNT / 120, **COMMON), clipped_formula(high=0.28, scale=COUNT / 120)),
        ["clipped"],
    ),
    "gspo": (GSPO(0.015, 0.02, **COMMON), clipped_formula(low=0.015, high=0.02, by_sequence=True), ["clipped"]),
    "cispo": (CISPO(0.9, 0.25, **COMMON), cispo_formula, ["clipped"]),
    **{f"everything, {mode}": switched(mode) for mode in ("off", "truncated", "masked")},
    **{
        f"{mode} {floor} by {level}": corrected(mode, level, floor)
        for level in ("token", "sequence", "geometric")
        for mode, floor in (("truncated", None), ("masked", None), ("masked", 0.97))
    },
    **{
        f"KL {estimator}": (
            clipped(kl_coefficient=0.3, kl_estimator=estimator, kl_cap=0.05),
            clipped_formula(beta=0.3, estimator=estimator, kl_cap=0.05),
            [],
        )
        for estimator in ("k2", "k3")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_against_its_paper(name: str) -> None:
    """Loss and gradient are those of the independent formula, and what is to act does so on some tokens, not on all."""
    objective, formula, acts = CASES[name]
    drawn = Drawn()
    x, y = (torch.tensor(column, requires_grad=True) for column in (drawn.new, drawn.entropies))
    loss, sums = objective(x, y, drawn.inputs())
    loss.backward()
    assert loss.item() == pytest.approx(formula(drawn, drawn.new), rel=1e-12)
    h = 1e-6
    slopes = [
        (formula(drawn, drawn.new + step) - formula(drawn, drawn.new - step)) / (2 * h) for step in np.eye(COUNT) * h
    ]
    np.testing.assert_allclose(x.grad, slopes, atol=1e-7)
    if objective.entropy_coefficient:
        np.testing.assert_allclose(y.grad, -objective.entropy_coefficient * drawn.omega, rtol=1e-12)
    else:
        assert y.grad is None, "without a bonus entropy stays out of the graph"
    assert all(0 < sums[acting].item() < COUNT for acting in acts)
    assert sums["clipped"].item() == sums["clipped_low"].item() + sums["clipped_high"].item()


def test_gspo_on_policy_is_pointwise_and_the_same() -> None:
    """At N_SGD 1 GSPO is computed token by token; its gradient is that of sequences whose ratios are all 1. With a
    correction of tokens s is of the sequence again."""
    drawn, gradients = Drawn(), []
    for objective, scope in ((GSPO(0.2, 0.2, **COMMON), "sequence"), (GSPO(0.2, 0.2, **ON_POLICY), "token")):
        assert objective.scope == scope
        x = torch.tensor(drawn.new, requires_grad=True)
        of = sequences(LENGTHS) if scope == "sequence" else None
        objective(x, torch.zeros_like(x), TokenInputs(torch.tensor(drawn.advantages), x.detach(), sequences=of))[
            0
        ].backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert GSPO(0.2, 0.2, correction="truncated", **ON_POLICY).scope == "sequence"


@pytest.mark.parametrize(
    ("mode", "cap", "options", "weights", "cut"),
    [
        ("truncated", 2.0, {}, [2, 1.5, 0.25], [True, False, False]),
        ("masked", 2.0, {}, [0, 1.5, 0], [True, False, True]),
        ("masked", 5.0, {"floor": 0.3}, [3, 1.5, 0], [False, False, True]),  # 1 / cap would keep 0.25
        ("masked", 2.0, {"level": "sequence", "sequences": sequences([3])}, [1.125] * 3, [False] * 3),
        ("masked", 2.0, {"level": "geometric", "sequences": sequences([3])}, [1.125 ** (1 / 3)] * 3, [False] * 3),
    ],
)
def test_correction_weights_by_hand(
    mode: Any, cap: float, options: dict[str, Any], weights: list[float], cut: list[bool]
) -> None:
    """The docstring's ratios 3, 1.5, 0.25: product 1.125, geometric mean 1.040."""
    made = correction_weights(double(3.0, 1.5, 0.25).log(), double(0, 0, 0), mode, cap, **options)
    assert made[0].tolist() == pytest.approx(weights) and made[1].tolist() == cut


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_mean_gradient_of_each_estimator(estimator: Any) -> None:
    """Over all five tokens of a vocabulary, by autograd through the exact KL: that of KL(p || q), or of KL(q || p)."""
    logits, other = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = other.log_softmax(-1)
    exact, mean = (logits.clone().requires_grad_() for _ in range(2))
    p = exact.log_softmax(-1)
    ((p.exp() * (p - q)).sum() if estimator == "k2" else (q.exp() * (q - p)).sum()).backward()
    log_p = mean.log_softmax(-1)
    (log_p.detach().exp() * kl_estimate(log_p, q, estimator)).sum().backward()
    torch.testing.assert_close(mean.grad, exact.grad)


def test_a_kl_of_beta_0_is_measured_alone() -> None:
    new = double(math.log(0.5), grad=True)
    inputs = tokens_of(new.detach(), double(0.0), reference_log_probs=double(math.log(0.25)))
    loss, sums = clipped(on_policy=True)(new, double(0.0), inputs)
    loss.backward()
    assert (loss.item(), new.grad.item()) == (0.0, 0.0)  # type: ignore[union-attr]  # it has one
    assert sums["kl"].item() == pytest.approx(LN2 - 0.5)
    assert "kl" not in clipped()(new, double(0.0), tokens_of(new.detach(), double(0.0)))[1]


def test_the_objective_of_a_step_is_the_configured_one() -> None:
    shape = {"steps": 1, "max_response_tokens": 4, "prompts_per_step": 8, "prompts_per_update": 4, "group_size": 2}
    stage = StageConfig.model_validate({"name": "s", "temperature": 0.7, **shape})
    algorithm = AlgorithmConfig.model_validate(
        {
            "loss": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0},
            "kl": {"coefficient": 0.02, "reference": "folder"},
            "correction": {"mode": "masked", "cap": 3.0},
        }
    )
    options: dict[str, Any] = {"kl_coefficient": 0.02, "correction": "masked", "correction_cap": 3.0}
    expected = ClippedPolicyLoss(0.1, 0.3, 4.0, entropy_coefficient=0.004, temperature=0.7, on_policy=False, **options)
    assert make_objective(algorithm, stage, alpha=0.004) == expected
    once = stage.model_copy(update={"prompts_per_update": 8})
    plain = make_objective(AlgorithmConfig(), once, alpha=0.0)
    assert plain == ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.0, temperature=0.7, on_policy=True)
    # Sampled by older weights: rho is against theirs, unless a correction makes up for them.
    for settings, expected_on_policy in ((AlgorithmConfig(), False), (algorithm, True)):
        stale = make_objective(settings, once, 0.0, stale=True)
        assert isinstance(stale, ClippedPolicyLoss) and stale.on_policy == expected_on_policy


def test_the_ratio_is_against_the_policy_that_was_scored_else_against_the_engine() -> None:
    """Log-probs -1: rho = e^1 against pi_k's -2 though the engine says -4; e^3 against the engine's alone; no side
    known: refused. A slice of the inputs has the same ones."""
    engine, policy, one = double(-9.0, -4.0), double(-9.0, -2.0), double(0.0, 1.0)
    for exponent, tokens in ((1.0, TokenInputs(one, engine, policy)), (3.0, TokenInputs(one, engine))):
        sums = clipped()(double(-1.0), double(0.0), tokens[1:])[1]
        assert sums["ratio"].item() == pytest.approx(math.exp(exponent))
        assert sums["max_abs_log_ratio"].item() == pytest.approx(exponent)


@pytest.mark.parametrize(
    ("objective", "tokens", "expected"),
    [
        (clipped(), TokenInputs(double(1.0)), "neither policy_log_probs nor engine_log_probs"),
        (clipped(correction="masked"), TokenInputs(double(1.0), None, double(-2.0)), "needs the engine's log-probs"),
        (
            clipped(correction="masked", correction_level="geometric"),
            TokenInputs(double(1.0), double(-2.0)),
            "level geometric needs whole sequences",
        ),
    ],
)
def test_inputs_that_are_missing_are_named(objective: Any, tokens: TokenInputs, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        objective(double(-1.0), double(0.0), tokens)


def test_monstrous_ratio_gives_finite_gradient() -> None:
    """exp(200) overflows fp32; behind a closed clip it must give 0, not 0 * inf."""
    new = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = clipped()(new, torch.zeros(2), tokens_of(torch.tensor([-200.0, -200.0]), torch.tensor([1.0, -1.0])))
    loss.backward()
    assert torch.isfinite(loss) and new.grad is not None and torch.isfinite(new.grad).all()


@pytest.mark.parametrize("objective", [clipped(alpha=0.1), switched("masked")[0], clipped(on_policy=True)])
def test_of_no_tokens_is_zero_and_pickles(objective: ClippedPolicyLoss) -> None:
    """A micro-batch that is all padding; and pickling, as on the way to the ranks."""
    assert pickle.loads(pickle.dumps(objective)) == objective
    empty = torch.zeros(0, requires_grad=True)
    loss, sums = objective(empty, torch.zeros(0), TokenInputs(*(torch.zeros(0) for _ in range(5))))
    loss.backward()
    assert loss.item() == 0 and all(value.item() == 0 for value in sums.values())
