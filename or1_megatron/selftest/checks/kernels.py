"""Self-test of the fused head: compares it with float64 on all logits; on a GPU also measures its workspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies, one_pass_loss
from or1_megatron.kernels.plain_head import reference_log_probs_and_entropies
from or1_megatron.selftest.one_check import Context

TOKENS: Final = 32768
VOCABULARY: Final = 152064
WORKSPACE_BYTES: Final = {"recompute": 350e6, "one_pass": 2.6e9}
"""Largest allowed workspace of the head in each mode, for 32,768 tokens and the vocabulary of a 32B model."""

Pointwise = Callable[[Tensor, Tensor, slice], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class HeadCase:
    """The inputs of one call of the head: T tokens, H hidden size, V vocabulary. The loss is sum(a * log-prob) +
    sum(c * entropy), without the second sum if ``c`` is None."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V + padding, H]
    targets: Tensor  # [T]
    a: Tensor  # [T]
    c: Tensor | None  # [T]
    temperature: float
    true_vocab_size: int
    budget_bytes: int | None = None
    mode: str = "recompute"


class HeadNumbers(NamedTuple):
    """The results of one call: log-probs and entropies [T], and the gradients of hidden states and weight."""

    log_probs: Tensor
    entropies: Tensor
    of_hidden: Tensor
    of_weight: Tensor


def normal_case(
    tokens: int,
    hidden: int,
    vocabulary: int,
    *,
    padding: int = 0,
    temperature: float = 1.0,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> HeadCase:
    """Return a case of random normal inputs, whose dot products fp32 must round. ``shift`` is added to all logits."""
    options: Any = {"generator": torch.Generator(device).manual_seed(tokens + vocabulary), "device": device}
    x = torch.randn(tokens, hidden, **options)
    weight = torch.randn(vocabulary + padding, hidden, **options) / hidden**0.5 * 2
    x[:, 0], weight[:, 0] = 1.0, shift
    weight[vocabulary:] = 1e3  # a padding row that is counted would dominate the softmax
    targets = torch.randint(vocabulary, (tokens,), **options)
    a, c = torch.randn(2, tokens, **options)
    return HeadCase(x.to(dtype), weight.to(dtype), targets, a, c, temperature, vocabulary)


NORMAL_CASES: Final[dict[str, dict[str, Any]]] = {
    "tails everywhere": {"tokens": 301, "hidden": 136, "vocabulary": 5003},
    "temperature 0.6": {"tokens": 256, "hidden": 128, "vocabulary": 4096, "temperature": 0.6},
    "one token": {"tokens": 1, "hidden": 64, "vocabulary": 777},
    "padded rows": {"tokens": 130, "hidden": 64, "vocabulary": 1000, "padding": 24},
    "all logits very negative": {"tokens": 65, "hidden": 64, "vocabulary": 1501, "shift": -1e4},
}
"""Arguments of ``normal_case``, by the name of the case."""


def kernels(context: Context) -> None:
    cuda = context.machine.cuda
    for epilogue in ("triton", "torch") if cuda else ("torch",):
        against_float64(context, epilogue)
    for mode, limit_bytes in WORKSPACE_BYTES.items() if cuda else ():
        context.require(f"{mode}: workspace", workspace_bytes(mode) / 1e6, "MB", at_most=limit_bytes / 1e6)


def against_float64(context: Context, epilogue: str) -> None:
    """Compare both modes of the head with float64: all cases in fp32 (limits: ``fp32_bounds``), one case in bf16."""
    device = "cuda" if context.machine.cuda else "cpu"
    for mode in WORKSPACE_BYTES:
        cases = [replace(normal_case(**case, device=device), mode=mode) for case in NORMAL_CASES.values()]
        explained, gradients = torch.tensor([differences(case, epilogue) for case in cases]).amax(0).tolist()
        name = f"{mode}, {epilogue}"
        context.require(f"{name}: log-prob and entropy, fp32, error / what rounding explains", explained, at_most=1.0)
        context.require(f"{name}: gradients relative to their norm, fp32", gradients, at_most=1e-4)
        case = normal_case(**NORMAL_CASES["tails everywhere"], dtype=torch.bfloat16, device=device)
        scores, gradients = differences(replace(case, mode=mode), epilogue)
        context.require(f"{name}: log-prob and entropy, bf16", scores, at_most=1e-3)
        context.require(f"{name}: gradients relative to their norm, bf16", gradients, at_most=1e-2)


def oracle(case: HeadCase) -> HeadNumbers:
    """Compute a case by autograd on the whole matrix of logits in float64; padding rows have gradient 0."""
    x, w = case.hidden.detach().double().requires_grad_(), case.weight.detach().double().requires_grad_()
    rows = w[: case.true_vocab_size]
    log_probs, entropies = reference_log_probs_and_entropies(x, rows, case.targets, case.temperature)
    loss = log_probs @ case.a.double()
    if case.c is not None:
        loss = loss + entropies @ case.c.double()
    loss.backward()
    assert x.grad is not None and w.grad is not None
    return HeadNumbers(log_probs.detach(), entropies.detach(), x.grad, w.grad)


def run_head(
    case: HeadCase, epilogue: str = "torch", shard: VocabularyShard | None = None, *, into_main_grad: bool = False
) -> HeadNumbers:
    """Compute a case with the fused head.

    Args:
        shard: the part of the vocabulary that ``case.weight`` holds; None: all of it.
        into_main_grad: add the weight's gradient to a ``main_grad`` of ones, which are subtracted from the result.
    """
    x = case.hidden.clone().requires_grad_()
    w: Any = case.weight.clone().requires_grad_()
    if into_main_grad:
        w.main_grad = torch.ones(w.shape, device=w.device)
    seen: list[tuple[Tensor, Tensor]] = []

    def pointwise(log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append((log_probs.detach(), entropies.detach()))
        loss = log_probs @ case.a[part]
        if case.c is not None:
            loss = loss + entropies @ case.c[part]
        return loss, {}

    given = (x, w, case.targets, case.temperature, shard or VocabularyShard(0, case.true_vocab_size))
    head_loss(case.mode, given, pointwise, epilogue=epilogue, budget_bytes=case.budget_bytes).backward()
    assert x.grad is not None
    log_probs, entropies = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return HeadNumbers(log_probs, entropies, x.grad, w.main_grad - 1.0 if into_main_grad else w.grad)


def head_loss(
    mode: str, given: tuple[Tensor, Tensor, Tensor, float, VocabularyShard], pointwise: Pointwise, **options: Any
) -> Tensor:
    """Return the loss of the fused head in a mode. ``given``: hidden states, weight, targets, temperature, shard."""
    if mode == "one_pass":
        return one_pass_loss(*given, pointwise, **options)[0]
    return pointwise(*log_probs_and_entropies(*given, **options), slice(None))[0]


def differences(case: HeadCase, epilogue: str) -> tuple[float, float]:
    """Return how the head differs from float64: (largest difference of scores, largest difference of gradients).

    Scores are log-probs and entropies; in fp32 their difference is divided by ``fp32_bounds``. The difference of
    gradients is relative to their norms, and 0 with ``shift``, since logits of 1e4 lose too many digits. Both
    differences are infinite if a padding row has a gradient, or if a probability is above 1.
    """
    true, ours = oracle(case), run_head(case, epilogue, into_main_grad=True)
    if ours.of_weight[case.true_vocab_size :].any() or float(ours.log_probs.max()) > 0.0:
        return float("inf"), float("inf")
    bounds = (1.0, 1.0)
    if case.hidden.dtype == torch.float32:
        bounds = fp32_bounds(case.hidden, case.weight[: case.true_vocab_size], case.temperature)
    off = [float((a.double() - b).abs().max()) for a, b in zip(ours, true, strict=True)]
    scores = max(off[0] / bounds[0], off[1] / bounds[1])
    if float(case.weight[0, 0]):
        return scores, 0.0
    return scores, max(relative(ours.of_hidden, true.of_hidden), relative(ours.of_weight, true.of_weight))


def relative(ours: Tensor, true: Tensor) -> float:
    return float((ours.double() - true).norm() / true.norm().clamp_min(1e-30))


def fp32_bounds(hidden: Tensor, weight: Tensor, temperature: float) -> tuple[float, float]:
    """Return the largest errors (of log-probs, of entropies) that fp32 rounding explains; inputs are [T, H] and [V, H].

    A dot product of H terms is off by about 4 sqrt(H) u sum |x w| at most, with u = 2^-24 and nearly independent
    rounding errors (Higham and Mary, 2019), in any order of summation. 64 more roundings account for the temperature,
    exp, and sums over the vocabulary in trees. If each logit moves by at most d, a log-prob moves by at most 2 d and an
    entropy by d sum p |log p + entropy|.
    """
    x, w = hidden.double(), weight.double()
    log_p = torch.log_softmax(x @ w.t() / temperature, dim=1)
    p = log_p.exp()
    spread = (p * (log_p - (p * log_p).sum(1, keepdim=True)).abs()).sum(1)
    terms = float((x.abs() @ w.abs().t()).max()) / temperature
    of_logits = (4 * hidden.shape[1] ** 0.5 * terms + 64) * 2**-24
    return 2 * of_logits, max(float(spread.max()), 1.0) * of_logits


def workspace_bytes(mode: str) -> int:
    """Return the bytes that forward + backward allocate in addition to inputs, gradients and main_grad.

    Only the hidden size (256) is smaller than in training. Only the second of two passes counts: in the first pass
    Triton compiles, and cuBLAS allocates a permanent workspace (32 MiB on Hopper) for each thread that multiplies
    matrices, including autograd's threads.
    """
    options: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    hidden = torch.randn(TOKENS, 256, **options).requires_grad_()
    weight: Any = (torch.randn(VOCABULARY, 256, **options) * 0.02).requires_grad_()
    weight.main_grad = torch.zeros(VOCABULARY, 256, device="cuda")
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    given = (hidden, weight, targets, 1.0, VocabularyShard(0, VOCABULARY))
    before = 0
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head_loss(mode, given, lambda log_probs, entropies, part: (log_probs.sum() + entropies.sum(), {})).backward()
    torch.cuda.synchronize()
    # outputs and accumulators: the hidden gradient in bf16 and fp32, and autograd's copy of the weight's stand-in
    outputs = hidden.numel() * (2 + 4) + weight.numel() * 2
    return torch.cuda.max_memory_allocated() - before - outputs
