"""Each objective against numbers worked by hand and a float64 implementation in numpy, written from its paper.

The gradients are compared with finite differences of that implementation. Nothing here says how an objective is spread
over ranks (``test_scored``, ``parallel/test_parity``) or whether it helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from or1_megatron.interfaces import Sequences, TokenInputs
from or1_megatron.rl.objectives.cispo import CISPO
from or1_megatron.rl.objectives.clip_cov import ClipCov
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.objectives.correction import correction_weights
from or1_megatron.rl.objectives.covariance import covariances, shuffled
from or1_megatron.rl.objectives.dapo import DAPO
from or1_megatron.rl.objectives.dr_grpo import DrGRPO
from or1_megatron.rl.objectives.estimators import kl_estimate
from or1_megatron.rl.objectives.gspo import GSPO
from or1_megatron.rl.objectives.kl_cov import KLCov

LENGTHS = (9, 1, 14, 6, 11, 4)
COMMON: dict[str, Any] = {"entropy_coefficient": 0.0, "temperature": 1.0, "on_policy": False}

Array = np.ndarray[Any, np.dtype[np.float64]]


def double(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def sequences(lengths: Sequence[int]) -> Sequences:
    sizes = torch.tensor(lengths)
    return Sequences(torch.arange(len(lengths)).repeat_interleave(sizes), sizes, torch.arange(len(lengths)) // 2)


def tokens_of(old: torch.Tensor, advantages: torch.Tensor, lengths: Sequence[int] = ()) -> TokenInputs:
    """One sequence, unless lengths are given."""
    return TokenInputs(advantages, old, sequences=sequences(lengths or [len(old)]))


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

    def inputs(self, **leave: Any) -> TokenInputs:
        columns = (self.advantages, self.engine, self.old, self.reference, self.omega)
        made = [torch.tensor(column) for column in columns]
        return TokenInputs(*made, sequences=sequences(LENGTHS))


def assert_same(objective: Any, expected: Callable[[Drawn, Array], float]) -> dict[str, float]:
    """Compare loss and gradient with the independent formula; return the objective's sums."""
    drawn = Drawn()
    x = torch.tensor(drawn.new, requires_grad=True)
    loss, sums = objective(x, torch.zeros(len(x), dtype=torch.float64), drawn.inputs())
    loss.backward()
    assert loss.item() == pytest.approx(expected(drawn, drawn.new), rel=1e-12)
    h = 1e-6
    slopes = [
        (expected(drawn, drawn.new + step) - expected(drawn, drawn.new - step)) / (2 * h)
        for step in np.eye(len(drawn.new)) * h
    ]
    np.testing.assert_allclose(x.grad, slopes, atol=2e-8)
    return {name: value.item() for name, value in sums.items()}


def clip_term(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def test_gspo_by_hand() -> None:
    """These are the docstring's figures: rho 1.5 and 1.2 at A 2 are clipped as a sequence; rho 1.1 and 1.0 are not."""
    for ratios, value, gradient in (((1.5, 1.2), 2.4, 0.0), ((1.1, 1.0), 2 * math.sqrt(1.1), 2 * math.sqrt(1.1))):
        new = double(*map(math.log, ratios), grad=True)
        loss, sums = GSPO(0.2, 0.2, **COMMON)(new, double(0, 0), tokens_of(double(0, 0), double(2, 2)))
        loss.backward()
        assert loss.item() == pytest.approx(-2 * value)
        np.testing.assert_allclose(new.grad, [-gradient] * 2, atol=1e-12)
        assert sums["clipped"].item() == (2 if gradient == 0 else 0)


def test_gspo_against_its_paper() -> None:
    """arXiv 2507.18071, eq. 5 and 7: mean over responses, ratio (pi / pi_old)^(1 / |y|); as response_mean weighs it."""

    def paper(drawn: Drawn, new: Array) -> float:
        total = 0.0
        for i in range(len(LENGTHS)):
            own = drawn.index == i
            s = math.exp((new[own] - drawn.old[own]).sum() / own.sum())
            total += float(drawn.omega[own].sum()) * clip_term(s, float(drawn.advantages[own][0]), 0.015, 0.02)
        return -total

    sums = assert_same(GSPO(0.015, 0.02, **COMMON), paper)
    assert 0 < sums["clipped"] < sum(LENGTHS)


def test_gspo_on_policy_with_a_correction_of_tokens() -> None:
    """s is still of the sequence, w of the token: with w 2 and 1, A 1, each token's gradient is the mean, 1.5."""
    new = double(-1.0, -2.0, grad=True)
    engine = new.detach() - double(2.0, 1.0).log()
    made = GSPO(0.2, 0.2, correction="truncated", correction_cap=9.0, **{**COMMON, "on_policy": True})
    assert made.scope == "sequence"
    made(new, double(0, 0), tokens_of(engine, double(1, 1)))[0].backward()
    np.testing.assert_allclose(new.grad, [-1.5, -1.5], atol=1e-12)


def test_gspo_on_policy_is_pointwise_and_the_same() -> None:
    """At N_SGD 1 GSPO is computed token by token; its gradient is that of sequences whose ratios are all 1."""
    drawn, weights = Drawn(), torch.ones(sum(LENGTHS), dtype=torch.float64)
    assert (GSPO(0.2, 0.2, **COMMON).scope, GSPO(0.2, 0.2, **{**COMMON, "on_policy": True}).scope) == (
        "sequence",
        "token",
    )
    found = []
    for on_policy in (False, True):
        x = torch.tensor(drawn.new, requires_grad=True)
        inputs = TokenInputs(torch.tensor(drawn.advantages), x.detach(), weights=weights)
        if not on_policy:
            inputs = TokenInputs(inputs.advantages, x.detach(), weights=weights, sequences=sequences(LENGTHS))
        GSPO(0.2, 0.2, **{**COMMON, "on_policy": on_policy})(x, torch.zeros_like(x), inputs)[0].backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1])


def test_cispo_by_hand() -> None:
    """These are the docstring's figures: rho 1.5 weighs 1.2, rho 0.5 is free below; log pi has the gradient."""
    log_probs = double(-1.0, -2.0, grad=True)
    old = log_probs.detach() - double(1.5, 0.5).log()
    loss, sums = CISPO(1.0, 0.2, **COMMON)(log_probs, double(0, 0), tokens_of(old, double(2, -1)))
    loss.backward()
    assert loss.item() == pytest.approx(-(-2.4 + 1.0))
    np.testing.assert_allclose(log_probs.grad, [-2.4, 0.5], atol=1e-12)
    assert (sums["clipped_high"].item(), sums["clipped_low"].item()) == (1, 0)


def test_cispo_against_its_paper() -> None:
    """arXiv 2506.13585, eq. 4 and 5; the weight is a constant, so the formula keeps it at the present log-probs."""

    def paper(drawn: Drawn, new: Array) -> float:
        weight = np.clip(np.exp(drawn.new - drawn.old), 1 - 0.9, 1 + 0.25)
        return -float((drawn.omega * weight * drawn.advantages * new).sum())

    assert_same(CISPO(0.9, 0.25, **COMMON), paper)


def test_dr_grpo_by_hand() -> None:
    """The docstring's responses have 1 and 3 tokens, J 2 and -1, L 8: 1/16 after the policy's division by 4 tokens."""
    inputs = tokens_of(double(0, 0, 0, 0), double(2, -1, -1, -1), (1, 3))
    made = DrGRPO(0.2, 0.2, length_share=4 / 16, **COMMON)
    loss, sums = made(double(0, 0, 0, 0), double(0, 0, 0, 0), inputs)
    assert loss.item() / 4 == pytest.approx(1 / 16) and sums["loss"].item() == loss.item()


def test_dr_grpo_against_its_paper() -> None:
    """arXiv 2503.20783, the loss without 1 / |o_i|, over a constant: (1 / R L) sum over responses of their sums."""
    longest, count = 20, sum(LENGTHS)

    def paper(drawn: Drawn, new: Array) -> float:
        total = 0.0
        for n, old, a, omega in zip(new, drawn.old, drawn.advantages, drawn.omega, strict=True):
            total += omega * clip_term(math.exp(n - old), a, 0.2, 0.28)
        return -total / (len(LENGTHS) * longest) * count  # the policy divides by the count

    assert_same(DrGRPO(0.2, 0.28, length_share=count / (len(LENGTHS) * longest), **COMMON), paper)


def test_dapo_is_the_clipped_loss() -> None:
    """arXiv 2503.14476, eq. 8: clip-higher over the token mean. Its penalty is in ``test_penalties``."""

    def paper(drawn: Drawn, new: Array) -> float:
        terms = [
            clip_term(math.exp(n - o), a, 0.2, 0.28) for n, o, a in zip(new, drawn.old, drawn.advantages, strict=True)
        ]
        return -float(np.dot(drawn.omega, terms))

    assert_same(DAPO(0.2, 0.28, **COMMON), paper)


def test_dapo_by_hand() -> None:
    """The docstring's figures: rho 1.25 is open at a high of 0.28, 1.4 is not, nor 0.7 at A < 0."""
    new = double(*map(math.log, (1.25, 1.4, 0.7)), grad=True)
    loss, _ = DAPO(0.2, 0.28, **COMMON)(new, double(0, 0, 0), tokens_of(double(0, 0, 0), double(2, 2, -1)))
    loss.backward()
    assert loss.item() == pytest.approx(-(2.5 + 2.56 - 0.8))
    np.testing.assert_allclose(new.grad, [-2.5, 0, 0], atol=1e-12)


def test_covariances_by_hand() -> None:
    assert covariances(double(-1, -3), double(2, 0)).tolist() == [1, 1]


def test_clip_cov_by_hand() -> None:
    """The docstring's figures: covariances (4, 1, 0, 6), half of the four tokens, of those from 1 to 5: the first two.
    The others keep their gradient -A."""
    log_probs = double(0, -1, -2, -5, grad=True)
    made = ClipCov(0.2, 0.2, share=0.5, lowest=1.0, highest=5.0, **{**COMMON, "on_policy": True})
    loss, sums = made(log_probs, double(0, 0, 0, 0), tokens_of(log_probs.detach(), double(2, 1, -1, -2)))
    loss.backward()
    np.testing.assert_allclose(log_probs.grad, [0, 0, 1, 2])
    assert sums["selected"].item() == 2 and sums["clipped"].item() == 0


def test_clip_cov_against_its_paper() -> None:
    """arXiv 2505.22617, eq. 10 to 12, with the ratio's clip; which candidates are drawn is read off the gradient, and
    must be floor(r N) of them."""
    made = ClipCov(0.2, 0.3, share=0.1, lowest=0.1, highest=2.0, seed=3, **COMMON)
    drawn = Drawn()
    x = torch.tensor(drawn.new, requires_grad=True)
    loss, _ = made(x, torch.zeros_like(x), drawn.inputs())
    loss.backward()
    cov = (drawn.new - drawn.new.mean()) * (drawn.advantages - drawn.advantages.mean())
    ratio = np.exp(drawn.new - drawn.old)
    closed = np.where(drawn.advantages > 0, ratio > 1.3, ratio < 0.8)
    assert x.grad is not None
    chosen = (x.grad.numpy() == 0) & ~closed
    assert chosen.sum() == int(0.1 * len(cov)) and ((cov[chosen] >= 0.1) & (cov[chosen] <= 2.0)).all()
    assert ((cov >= 0.1) & (cov <= 2.0) & ~closed).sum() > chosen.sum(), "there is nothing to draw"
    plain, _ = ClippedPolicyLoss(0.2, 0.3, **COMMON)(x, torch.zeros_like(x), drawn.inputs())
    assert loss.item() == pytest.approx(plain.item())
    expected = np.where(closed | chosen, 0.0, -drawn.omega * ratio * drawn.advantages)
    beta = 0.0  # no KL in the loss
    np.testing.assert_allclose(x.grad.numpy(), expected + beta, atol=1e-12)


def test_clip_covs_draw_ignores_the_last_bits_of_the_policys_log_probs() -> None:
    """They differ between layouts. Which tokens are drawn is read off the gradient: 50 of 100, of which all may be."""
    generator = torch.Generator().manual_seed(1)
    engine, advantages = (torch.randn(100, generator=generator) for _ in range(2))
    made, drawn = ClipCov(0.2, 0.2, share=0.5, lowest=-99.0, highest=99.0, **COMMON), []
    for policy in (engine, torch.nextafter(engine, torch.tensor(9.0))):
        x = policy.clone().requires_grad_()
        tokens = TokenInputs(advantages, engine_log_probs=engine, policy_log_probs=policy, sequences=sequences([100]))
        made(x, torch.zeros(100), tokens)[0].backward()
        assert x.grad is not None
        drawn.append((x.grad == 0).tolist())
    assert drawn[0] == drawn[1] and sum(drawn[0]) == 50


def test_random_choice_depends_on_tokens_and_seed_and_not_on_their_order() -> None:
    """Half of the 60 tokens have a log-prob of exactly 0. Which are drawn: the same ones with the samples in another
    order; others with another seed; over 400 seeds each token as often as any other, those of log-prob 0 too."""
    lengths = [10, 4, 20, 1, 15, 10]
    index = torch.arange(6).repeat_interleave(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(5)
    old = torch.rand(60, generator=generator).sub(0.5).clamp(max=0.0)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])[index]

    def draw(seed: int, order: list[int]) -> set[int]:
        turned = torch.cat([(index == i).nonzero()[:, 0] for i in order])
        of = sequences([lengths[i] for i in order])
        return set(turned[shuffled(seed, of, old[turned], advantages[turned])[:10]].tolist())

    draws = [draw(seed, [0, 1, 2, 3, 4, 5]) for seed in range(400)]
    assert draws == [draw(seed, [4, 2, 5, 0, 3, 1]) for seed in range(400)] and draws[0] != draws[1]
    counts = np.bincount([token for drawn in draws for token in drawn], minlength=60)
    expected = 400 / 6
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected * 5 / 6)  # of 400 draws of 10 in 60, each token


def test_random_choice_is_made_on_the_tokens_device() -> None:
    """`or1 check-parity` has them on the GPU. "meta" stands for it: a tensor made elsewhere raises."""
    of = sequences([4, 2])
    there = Sequences(of.index.to("meta"), of.lengths.to("meta"), None)
    assert shuffled(1, there, torch.zeros(6, device="meta")).device.type == "meta"


def test_kl_cov_by_hand() -> None:
    """The docstring's figures: covariances (1, 0, 0), a third of three tokens is the first; rho 1.2."""
    log_probs = double(0, -2, -1, grad=True)
    old = log_probs.detach() - math.log(1.2)
    inputs = tokens_of(old, double(1, 0, -1))
    loss, sums = KLCov(share=0.34, penalty=1.0, **COMMON)(log_probs, double(0, 0, 0), inputs)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 - math.log(1.2) + 0 - 1.2))
    np.testing.assert_allclose(log_probs.grad, [-0.2, 0, 1.2], atol=1e-12)
    assert sums["selected"].item() == 1


def test_kl_cov_against_its_paper() -> None:
    """arXiv 2505.22617, eq. 13 and 14, with the authors' |log pi_old - log pi_theta|."""

    def paper(drawn: Drawn, new: Array) -> float:
        fixed = (drawn.new - drawn.new.mean()) * (drawn.advantages - drawn.advantages.mean())
        top = np.argsort(-fixed)[: int(0.2 * len(new))]
        terms = np.exp(new - drawn.old) * drawn.advantages
        terms[top] -= 0.7 * np.abs(drawn.old - new)[top]
        return -float((drawn.omega * terms).sum())

    assert assert_same(KLCov(share=0.2, penalty=0.7, **COMMON), paper)["selected"] == int(0.2 * sum(LENGTHS))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "floor"), [("truncated", None), ("masked", None), ("masked", 0.97)])
def test_correction_levels(level: Any, mode: Any, floor: float | None) -> None:
    """w of each token by its definition, and that the loss is weighted by it: TIS and IcePop of tokens, and their forms
    of sequences (the product) and geometric means."""
    cap = {"token": 1.2, "sequence": 1.5, "geometric": 1.05}[level]

    def paper(drawn: Drawn, new: Array) -> float:
        total = 0.0
        for t in range(len(new)):
            own = drawn.index == drawn.index[t]
            log_ratios = (drawn.old - drawn.engine)[own]
            log_w = {"sequence": log_ratios.sum(), "geometric": log_ratios.mean()}.get(
                level, drawn.old[t] - drawn.engine[t]
            )
            w = math.exp(log_w)
            w = min(w, cap) if mode == "truncated" else (w if (floor or 1 / cap) <= w <= cap else 0.0)
            total -= drawn.omega[t] * w * clip_term(math.exp(new[t] - drawn.old[t]), drawn.advantages[t], 0.2, 0.2)
        return total

    correction = {"correction": mode, "correction_cap": cap, "correction_floor": floor, "correction_level": level}
    made = ClippedPolicyLoss(0.2, 0.2, **correction, **COMMON)
    assert made.scope == ("token" if level == "token" else "sequence")
    assert 0 < assert_same(made, paper)["weight_cut"] < sum(LENGTHS)


def test_correction_levels_by_hand() -> None:
    """The docstring's ratios 3, 1.5, 0.25: product 1.125, geometric mean 1.040; without sequences it is refused."""
    log_ratios, nothing = double(3.0, 1.5, 0.25).log(), double(0, 0, 0)
    for level, expected in (("sequence", 1.125), ("geometric", 1.125 ** (1 / 3))):
        weights, cut = correction_weights(log_ratios, nothing, "masked", 2.0, level, sequences([3]))  # type: ignore[arg-type]  # a literal
        assert weights.tolist() == pytest.approx([expected] * 3) and not cut.any()
    weights, _ = correction_weights(log_ratios, nothing, "masked", 5.0, floor=0.3)
    assert weights.tolist() == pytest.approx([3.0, 1.5, 0.0])  # 1 / cap would keep 0.25
    with pytest.raises(ValueError, match="level geometric needs whole sequences"):
        correction_weights(log_ratios, nothing, "masked", 2.0, "geometric")


def test_kl_estimators_by_hand() -> None:
    """p = 1/2, q = 1/4: (value, gradient) of each, straight through, and capped; log p - log q = -3: k3 16.1, capped 10
    without gradient."""
    half, quarter = math.log(0.5), math.log(0.25)
    ln2 = math.log(2)
    cases: list[tuple[dict[str, Any], float, float]] = [
        ({"estimator": "k1"}, ln2, 1.0),
        ({"estimator": "k2"}, ln2**2 / 2, ln2),
        ({"estimator": "k3"}, ln2 - 0.5, 0.5),
        ({"estimator": "k3", "straight_through": True}, ln2 - 0.5, ln2),
        ({"estimator": "k1", "cap": 0.5}, 0.5, 0.0),
        ({"estimator": "k3", "cap": 0.5}, ln2 - 0.5, 0.5),
    ]
    for options, value, gradient in cases:
        p = double(half, grad=True)
        found = kl_estimate(p, double(quarter), **options)
        found.sum().backward()
        assert (found.item(), p.grad.item()) == pytest.approx((value, gradient)), options  # type: ignore[union-attr]  # it has one
    beyond = ((None, False, math.exp(3) - 4, 1 - math.exp(3)), (10.0, False, 10.0, 0.0), (10.0, True, 10.0, -3.0))
    for cap, straight, value, gradient in beyond:
        p = double(-4.0, grad=True)
        found = kl_estimate(p, double(-1.0), "k3", cap, straight)
        found.sum().backward()
        assert (found.item(), p.grad.item()) == pytest.approx((value, gradient))  # type: ignore[union-attr]  # it has one


@pytest.mark.parametrize(
    ("estimator", "straight", "of"), [("k1", False, None), ("k2", False, "pq"), ("k3", False, "qp"), ("k3", True, "pq")]
)
def test_the_mean_gradient_of_each_estimator(estimator: Any, straight: bool, of: str | None) -> None:
    """Over all five tokens of a vocabulary, by autograd through the exact KL: 0, or that of KL(p || q), KL(q || p)."""
    logits, other = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = other.log_softmax(-1)
    exact, mean = (logits.clone().requires_grad_() for _ in range(2))
    p = exact.log_softmax(-1)
    if of is not None:
        ((p.exp() * (p - q)).sum() if of == "pq" else (q.exp() * (q - p)).sum()).backward()
    log_p = mean.log_softmax(-1)
    (log_p.detach().exp() * kl_estimate(log_p, q, estimator, None, straight)).sum().backward()
    torch.testing.assert_close(mean.grad, torch.zeros(5).double() if of is None else exact.grad)


@pytest.mark.parametrize("mode", ["off", "truncated"])
def test_straight_through_in_the_loss(mode: Any) -> None:
    """The value is k3's, cut at 0.05; the gradient is that of a loss with k2, beyond the cap, too."""
    common = {**COMMON, "correction": mode, "kl_coefficient": 0.3}
    drawn, found = Drawn(), []
    for options in ({"kl_cap": 0.05, "kl_straight_through": True}, {"kl_estimator": "k2"}, {"kl_cap": 0.05}):
        x = torch.tensor(drawn.new, requires_grad=True)
        loss, _ = ClippedPolicyLoss(0.2, 0.2, **common, **options)(x, torch.zeros_like(x), drawn.inputs())
        loss.backward()
        found.append((loss.item(), x.grad))
    assert found[0][0] == pytest.approx(found[2][0], rel=1e-12) and found[0][0] != pytest.approx(found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss(estimator: Any) -> None:
    """beta 0.3 times the estimate is added to each token's loss; a cap of 0.05 cuts some."""

    def paper(drawn: Drawn, new: Array) -> float:
        d = new - drawn.reference
        kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
        ratio = np.exp(new - drawn.old)
        terms = np.minimum(ratio * drawn.advantages, np.clip(ratio, 0.8, 1.2) * drawn.advantages)
        return float((drawn.omega * (0.3 * np.clip(kl, -0.05, 0.05) - terms)).sum())

    assert_same(ClippedPolicyLoss(0.2, 0.2, kl_coefficient=0.3, kl_estimator=estimator, kl_cap=0.05, **COMMON), paper)
