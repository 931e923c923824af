"""The fused head: against float64 on all logits, its workspace, and its time against the floor of its matrix products.

The time is that of forward and backward of -sum(A log p + 0.01 H) at N = 32768 tokens, H = 5120, V = 152064 in bf16,
with gradients to hidden states and weight, the weight's in fp32 main_grad as under Megatron. The floor is 8NHV
(recompute) or 6NHV (one_pass) operations at the rate of one large matrix product, measured in the same rounds, and the
expected time is kernels/estimate.py's at that rate. The variants take turns; medians. With --long also Liger's kernel
(a plain cross-entropy without entropy, in one pass) and verl's (both, recomputing).
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from or1_megatron.config.hardware import Hardware, hardware_of
from or1_megatron.kernels.estimate import Gpu, Mode, estimate
from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies, one_pass_loss
from or1_megatron.kernels.plan import allocation_plan
from or1_megatron.kernels.reference import reference_log_probs_and_entropies
from or1_megatron.selftest.context import Context

ENTROPY_COEFFICIENT: Final = 0.01
MODES: Final = ("recompute", "one_pass")

Given = tuple[Tensor, Tensor, Tensor, float, VocabularyShard]
Pointwise = Callable[[Tensor, Tensor, slice], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class HeadCase:
    """Inputs to be compared with float64."""

    tokens: int
    hidden: int
    vocabulary: int
    padded_rows: int = 0
    temperature: float = 1.0
    shift: float = 0.0
    """An offset of all logits of a token."""


CASES: Final = {
    "tails everywhere": HeadCase(301, 136, 5003),
    "temperature 0.6": HeadCase(256, 128, 4096, temperature=0.6),
    "one token": HeadCase(1, 64, 777),
    "padded rows": HeadCase(130, 64, 1000, padded_rows=24),
    "all logits very negative": HeadCase(65, 64, 1501, shift=-1e4),
}


def kernels(context: Context) -> None:
    cuda = context.machine.cuda
    epilogues = ("triton", "torch") if cuda else ("torch",)
    for epilogue in epilogues:
        against_float64(context, epilogue)
    if cuda:
        for mode, limit_bytes in (("recompute", 350e6), ("one_pass", 2.6e9)):
            context.require(f"{mode}: workspace", workspace_bytes(mode) / 1e6, "MB", at_most=limit_bytes / 1e6)
    size = FULL if cuda else SMALL
    inputs = TimedInputs(size, "cuda" if cuda else "cpu")
    variants, absent = inputs.variants(epilogues, others=context.long)
    found = measure(inputs, variants, 7 if context.long else 3, absent)
    note_times(context, size, found, epilogues[0])
    for name, why in absent.items():
        context.measure(f"time, {name}", why)


def against_float64(context: Context, epilogue: Any) -> None:
    """Compare all cases, in both modes, with float64; in fp32 relative to what rounding explains (``fp32_bounds``)."""
    device = "cuda" if context.machine.cuda else "cpu"
    for mode in MODES:
        worst: dict[str, float] = {"log-prob and entropy": 0.0, "gradients": 0.0}
        for case in CASES.values():
            scores, gradients = HeadComparison(case, torch.float32, device).differences(mode, epilogue)
            worst["log-prob and entropy"] = _larger(worst["log-prob and entropy"], scores)
            worst["gradients"] = _larger(worst["gradients"], gradients)
        name = f"{mode}, {epilogue}"
        explained = worst["log-prob and entropy"]
        context.require(f"{name}: log-prob and entropy, fp32, error / what rounding explains", explained, at_most=1.0)
        context.require(f"{name}: gradients relative to their norm, fp32", worst["gradients"], at_most=1e-4)
        scores, gradients = HeadComparison(CASES["tails everywhere"], torch.bfloat16, device).differences(
            mode, epilogue
        )
        context.require(f"{name}: log-prob and entropy, bf16", scores, at_most=1e-3)
        context.require(f"{name}: gradients relative to their norm, bf16", gradients, at_most=1e-2)


def _larger(a: float, b: float) -> float:
    """Return the maximum, or NaN where one of them is NaN."""
    return a if a >= b or a != a else b


class HeadComparison:
    """One case's inputs, and the head's results for them in float64: the loss is sum(a log p) + sum(c H)."""

    def __init__(self, case: HeadCase, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(case.tokens + case.vocabulary)
        options: dict[str, Any] = {"generator": generator, "device": device}
        hidden = torch.randn(case.tokens, case.hidden, **options)
        weight = torch.randn(case.vocabulary + case.padded_rows, case.hidden, **options) / case.hidden**0.5 * 2
        hidden[:, 0], weight[:, 0] = 1.0, case.shift
        weight[case.vocabulary :] = 1e3  # a padded row that is counted would win
        self.case = case
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.targets = torch.randint(case.vocabulary, (case.tokens,), **options)
        self.a, self.c = torch.randn(2, case.tokens, **options)

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (log-probs, entropies, gradient of hidden, of weight) in float64."""
        x = self.hidden.double().requires_grad_()
        w = self.weight[: self.case.vocabulary].double().requires_grad_()
        log_probs, entropies = reference_log_probs_and_entropies(x, w, self.targets, self.case.temperature)
        (log_probs @ self.a.double() + entropies @ self.c.double()).backward()
        assert x.grad is not None and w.grad is not None
        return log_probs.detach(), entropies.detach(), x.grad, w.grad

    def found(self, mode: str, epilogue: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same of the head; the weight's gradient is what it adds to main_grad, padded rows included."""
        hidden = self.hidden.clone().requires_grad_()
        weight: Any = self.weight.clone().requires_grad_()
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        shard = VocabularyShard(first_row=0, true_vocab_size=self.case.vocabulary)
        seen: list[tuple[Tensor, Tensor]] = []

        def pointwise(p: Tensor, h: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
            seen.append((p.detach(), h.detach()))
            return (p * self.a[part]).sum() + (h * self.c[part]).sum(), {}

        head_loss(mode, (hidden, weight, self.targets, self.case.temperature, shard), pointwise, epilogue).backward()
        log_probs, entropies = (torch.cat(parts) for parts in zip(*seen, strict=True))
        assert hidden.grad is not None
        return log_probs, entropies, hidden.grad, weight.main_grad - 1.0

    def differences(self, mode: str, epilogue: Any) -> tuple[float, float]:
        """Return the largest difference of a log-prob or entropy, for fp32 as a share of ``fp32_bounds``; and of the
        gradients, relative to their norms. A gradient of a padded row, or a probability above 1, counts as infinite."""
        true, found, rows = self.expected(), self.found(mode, epilogue), self.case.vocabulary
        if found[3][rows:].any() or float(found[0].max()) > 0.0:
            return float("inf"), float("inf")
        bounds = (1.0, 1.0)
        if self.hidden.dtype == torch.float32:
            bounds = fp32_bounds(self.hidden, self.weight[:rows], self.case.temperature)
        off = [float((f.double() - t).abs().max()) for f, t in zip(found[:2], true[:2], strict=True)]
        scores = max(each / bound for each, bound in zip(off, bounds, strict=True))
        if self.case.shift:
            return scores, 0.0
        pairs = ((found[2], true[2]), (found[3][:rows], true[3]))
        return scores, max(float((f.double() - t).norm() / t.norm()) for f, t in pairs)


def head_loss(mode: str, given: Given, pointwise: Pointwise, epilogue: Any = "auto") -> Tensor:
    """Return the loss of the fused head; ``given``: hidden states, weight, targets, temperature and shard."""
    hidden, weight, targets, temperature, shard = given
    if mode == "recompute":
        scored = log_probs_and_entropies(hidden, weight, targets, temperature, shard, epilogue=epilogue)
        return pointwise(*scored, slice(None))[0]
    return one_pass_loss(hidden, weight, targets, temperature, shard, pointwise, epilogue=epilogue)[0]


def fp32_bounds(hidden: Tensor, weight: Tensor, temperature: float) -> tuple[float, float]:
    """Return how far rounding in fp32 may move log-probs and entropies. ``hidden`` is [T, H], ``weight`` [V, H].

    A dot product of H terms is off by about 4 sqrt(H) u sum |x w| at most, with u = 2^-24 and rounding errors as good
    as independent (Higham and Mary, 2019), whatever the order of its sums. 64 more roundings stand for the temperature,
    exp, and sums over the vocabulary in trees. If each logit moves by at most d, a log-prob moves by at most 2 d and an
    entropy by d sum p |log p + H|.
    """
    x, w = hidden.double(), weight.double()
    log_p = torch.log_softmax(x @ w.t() / temperature, dim=1)
    p = log_p.exp()
    spread = (p * (log_p - (p * log_p).sum(1, keepdim=True)).abs()).sum(1)
    terms = float((x.abs() @ w.abs().t()).max()) / temperature
    of_logits = (4 * hidden.shape[1] ** 0.5 * terms + 64) * 2**-24
    return 2 * of_logits, max(float(spread.max()), 1.0) * of_logits


def workspace_bytes(mode: str) -> int:
    """Return what the head allocates at N = 32768, V = 152064 beside inputs, the gradients and main_grad (H is small
    here)."""
    tokens, width, vocabulary = 32768, 256, 152064
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight.main_grad = torch.zeros(vocabulary, width, device="cuda")  # type: ignore[attr-defined]
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    shard = VocabularyShard(first_row=0, true_vocab_size=vocabulary)

    def pointwise(p: Tensor, h: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return -p.sum() - 0.1 * h.sum(), {}

    def clear() -> None:
        hidden.grad = weight.grad = None

    peak = peak_bytes(lambda: head_loss(mode, (hidden, weight, targets, 1.0, shard), pointwise).backward(), clear)
    # outputs and accumulators: the hidden gradient in bf16 and fp32, and autograd's copy of the weight's stand-in
    outputs = hidden.numel() * (2 + 4) + weight.numel() * 2
    return peak - outputs


@dataclass(frozen=True)
class Size:
    tokens: int
    hidden: int
    vocabulary: int
    product_columns: int
    """The floor is the rate of a matrix product [tokens, hidden] by [hidden, product_columns]."""

    def operations(self, products: int) -> float:
        """Return the operations of this many products of the whole size."""
        return 2.0 * products * self.tokens * self.hidden * self.vocabulary


FULL: Final = Size(32768, 5120, 152064, 16384)
SMALL: Final = Size(256, 128, 4096, 1024)


class TimedInputs:
    """Inputs on the device, and the variants as passes forward and backward."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        options: Any = {"dtype": torch.bfloat16, "device": device}
        self.size = size
        self.hidden = torch.randn(size.tokens, size.hidden, **options).requires_grad_()
        self.weight: Any = (torch.randn(size.vocabulary, size.hidden, **options) * 0.02).requires_grad_()
        self.main_grad = torch.zeros(size.vocabulary, size.hidden, device=device)
        self.targets = torch.randint(size.vocabulary, (size.tokens,), device=device)
        self.advantages = torch.randn(size.tokens, device=device)
        self.shard = VocabularyShard(0, size.vocabulary)
        self.product_out = torch.empty(size.tokens, size.product_columns, **options)

    def variants(
        self, epilogues: tuple[str, ...], others: bool
    ) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
        """Return (passes by name, why each of the others is absent); ``others``: verl's and Liger's too."""
        found: dict[str, Callable[[], None]] = {"product": self._product}
        for epilogue in epilogues:
            for mode in MODES:
                found[f"{mode}, {epilogue}"] = partial(self._head, mode, epilogue)
        absent: dict[str, str] = {}
        for name, make in (("verl", self._verl), ("Liger", self._liger)) if others else ():
            try:
                found[name] = make()
            except ImportError as error:
                absent[name] = f"not installed ({error})"
        return found, absent

    def _loss(self, log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        # the coefficient inside the sum: verl's kernel wants gradients that are contiguous, and a sum's alone is not
        return -(log_probs @ self.advantages[part]) - (ENTROPY_COEFFICIENT * entropies).sum(), {}

    def _product(self) -> None:
        torch.mm(self.hidden.detach(), self.weight.detach()[: self.size.product_columns].t(), out=self.product_out)

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def _begin(self, into_main_grad: bool) -> None:
        self.clear()
        if into_main_grad:
            self.weight.main_grad = self.main_grad
        elif hasattr(self.weight, "main_grad"):
            del self.weight.main_grad

    def _head(self, mode: str, epilogue: Any) -> None:
        self._begin(into_main_grad=True)
        head_loss(mode, (self.hidden, self.weight, self.targets, 1.0, self.shard), self._loss, epilogue).backward()

    def _verl(self) -> Callable[[], None]:
        verl = importlib.import_module("verl.utils.kernel.linear_cross_entropy")

        def run() -> None:
            self._begin(into_main_grad=False)
            scored: Any = verl.linear_cross_entropy(self.hidden, self.weight, self.targets, 1.0, "none", None)
            self._loss(scored[0], scored[1], slice(None))[0].backward()

        return run

    def _liger(self) -> Callable[[], None]:
        liger = importlib.import_module("liger_kernel.transformers")
        loss = liger.LigerFusedLinearCrossEntropyLoss(reduction="sum")

        def run() -> None:
            self._begin(into_main_grad=False)
            loss(self.weight, self.hidden, self.targets).backward()

        return run


def seconds(work: Callable[[], None]) -> float:
    if not torch.cuda.is_available():
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_bytes(work: Callable[[], None], clear: Callable[[], None]) -> int:
    """Return the peak above what is allocated before, gradients included; 0 without a GPU.

    A pass that is not counted goes before: it compiles, and makes cuBLAS allocate what it keeps for good, a workspace
    (32 MiB on Hopper) for each thread that multiplies, autograd's among them. ``clear`` frees a pass's gradients.
    """
    work()
    clear()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    inputs: TimedInputs, variants: dict[str, Callable[[], None]], rounds: int, absent: dict[str, str]
) -> dict[str, tuple[float, int]]:
    """Return median seconds and peak bytes; ``absent`` names the variants that fail at their warm-up."""
    peaks: dict[str, int] = {}
    for name, work in variants.items():
        try:
            peaks[name] = peak_bytes(work, inputs.clear)
        except Exception as error:
            if name not in ("verl", "Liger"):
                raise
            absent[name] = f"failed: {type(error).__name__}: {error}"[:200]
    times: dict[str, list[float]] = {name: [] for name in peaks}
    for _ in range(rounds):
        for name in peaks:
            times[name].append(seconds(variants[name]))
    return {name: (statistics.median(times[name]), peaks[name]) for name in peaks}


def expected_s(size: Size, mode: Mode, card: Hardware, rate: float) -> float:
    """Return the estimate for this size on this card, at the measured rate of products."""
    plan = allocation_plan(size.tokens, size.hidden, size.vocabulary, torch.bfloat16, mode)
    tile, gpu = (plan.tile_tokens, plan.block_rows), replace(Gpu.of(card), flops=rate)
    return estimate(size.tokens, size.hidden, size.vocabulary, *tile, mode, gpu).seconds


def note_times(context: Context, size: Size, found: dict[str, tuple[float, int]], epilogue: str) -> None:
    """Note the times beside their floors. On CPU a small size: nothing is expected of its times."""
    cuda = context.machine.cuda
    card = hardware_of(torch.cuda.get_device_name()) if cuda else None
    product_s = found["product"][0]
    rate = 2.0 * size.tokens * size.hidden * size.product_columns / product_s
    floors: dict[Mode, float] = {"recompute": size.operations(4) / rate, "one_pass": size.operations(3) / rate}
    ours = {mode: found[f"{mode}, {epilogue}"][0] for mode in floors}
    share, ratio = (0.85, 0.85) if cuda else (None, None)
    context.measure("recompute, floor / time", floors["recompute"] / ours["recompute"], "share", at_least=share)
    context.measure("time, one_pass / recompute", ours["one_pass"] / ours["recompute"], at_most=ratio)
    context.measure("one_pass, floor / time", floors["one_pass"] / ours["one_pass"], "share")
    context.measure("rate of one matrix product", rate / 1e12, "TFLOP/s")
    for mode, floor in floors.items():
        context.measure(f"floor, {mode}", floor * 1e3, "ms")
        if card is not None:
            context.measure(f"expected time / time, {mode}", expected_s(size, mode, card, rate) / ours[mode])
    for name, (time_s, peak) in found.items():
        if name != "product":
            context.measure(f"time, {name}", time_s * 1e3, "ms")
            if cuda:
                context.measure(f"peak memory beyond inputs, {name}", peak / 1e6, "MB")
