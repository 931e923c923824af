"""Checks a loss (objective) for faults on random tokens, without a model; ``or1 check-parity`` runs this first."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from or1_megatron.interfaces import Objective, Scope, Sequences, TokenInputs, scope_of
from or1_megatron.rl.objectives.registry import build

PROBE_TEMPERATURE: Final = 0.8
_LENGTHS: Final = (7, 1, 12, 5, 9, 3, 16, 11)
"""Response tokens of the random sequences."""
_TOLERANCE: Final = 1e-9
"""Relative and absolute tolerance of comparisons in float64."""

Result = tuple[Tensor, Mapping[str, Tensor], Tensor]
"""(loss, named sums, gradients [2, N] of the loss by log-probs and by entropies)."""
_ADVICE: Final = "expected a sum over tokens, or max_ before its name; the policy divides once, by the batch's tokens"
_LARGEST: Final = "the sum 'max_"

_PROBE_ARGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gspo": {"clip_low": 0.03, "clip_high": 0.03},
    "cispo": {"clip_low": 0.1, "clip_high": 0.1},
    "dr_grpo": {"length_share": 0.3},
    "dapo": {"clip_high": 0.28},
}
"""For each objective, arguments with which its clips or its scale take effect on about a hundred random tokens."""


def probe_objective(dtype: str, name: str = "clipped", args: Mapping[str, Any] = MappingProxyType({})) -> Objective:
    """Return the named objective with the parameters that ``or1 check-parity`` uses on a model of this dtype.

    The objective has a KL penalty and an entropy bonus, so that both gradients of the head are tested. In fp32 it also
    has ratios, clips and an importance correction. In bf16 it has none of these, because rounding would decide which
    tokens are clipped, and small differences would become large. ``args`` override any parameter of the objective.

    Raises ConfigError when there is no objective or parameter of a given name.
    """
    exact = dtype == "float32"
    settings = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "entropy_coefficient": 0.3,
        "temperature": PROBE_TEMPERATURE,
        "on_policy": not exact,
        "dual_clip": 1.3 if exact else None,
        "kl_coefficient": 0.1,
        "correction": "masked" if exact else "off",
        "correction_cap": 1.5,
    }
    return build(name, settings, {**_PROBE_ARGS.get(name, {}), **args})


class _Tokens:
    """Random tokens: log-probs and entropies [N], and the objective's other inputs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(sum(_LENGTHS), generator=generator, dtype=torch.float64)

        self.lengths = torch.tensor(_LENGTHS)
        old = -1.0 - normal(0.5).abs()
        self.log_probs, self.entropies = old + normal(0.3), 1.0 + normal(0.3).abs()
        index = torch.arange(len(_LENGTHS)).repeat_interleave(self.lengths)
        of_sequences = torch.randn(len(_LENGTHS), generator=generator, dtype=torch.float64)
        self.inputs = TokenInputs(
            advantages=of_sequences[index],
            engine_log_probs=old + normal(0.2),
            policy_log_probs=old,
            reference_log_probs=old + normal(0.3),
            weights=1.0 + 0.5 * of_sequences[index].tanh(),
            sequences=Sequences(index, self.lengths),
        )

    def evaluate(self, objective: Objective, indices: Tensor, scope: Scope, bare: bool = False) -> Result:
        """Return the objective's result on the tokens at ``indices``; repeated indices form separate sequences.

        ``bare``: give the objective only the inputs that every run has.
        """
        leaves = [values[indices].clone().requires_grad_() for values in (self.log_probs, self.entropies)]
        inputs = _at(self.inputs, indices, scope)
        if bare:
            inputs = replace(inputs, reference_log_probs=None, policy_log_probs=None, weights=None)
        returned = objective(leaves[0], leaves[1], inputs)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
            raise TypeError(f"returned {returned!r:.80}, expected a pair (loss, sums by name)")
        loss, sums = returned
        if not (isinstance(loss, Tensor) and loss.dim() == 0):
            raise TypeError(f"returned {loss!r:.80} as the loss, expected a tensor without dimensions")
        wrong = [name for name, value in sums.items() if not isinstance(value, Tensor) or value.dim() > 0]
        if wrong:
            raise TypeError(f"returned sums that are no tensors without dimensions: {', '.join(wrong)}")
        if len(indices) and not loss.requires_grad:
            raise TypeError("returned a loss without a gradient; expected one that log-probs or entropies enter")
        if len(indices):
            loss.backward()
        grads = [torch.zeros(len(indices), dtype=torch.float64) if leaf.grad is None else leaf.grad for leaf in leaves]
        return loss.detach(), sums, torch.stack(grads)


def faults(objective: Objective) -> Iterator[str]:
    """Yield a sentence for each fault of the objective. A field ``on_policy`` is tried as True and as False."""
    sentences = list(_faults(objective))
    if not sentences and is_dataclass(objective) and isinstance(before := getattr(objective, "on_policy", None), bool):
        sentences = list(_faults(replace(objective, on_policy=not before)))
    yield from sentences


def _faults(objective: Objective) -> Iterator[str]:
    tokens, name = _Tokens(), type(objective).__name__
    try:
        scope = scope_of(objective)
        every = torch.arange(sum(_LENGTHS))
        whole, again = (tokens.evaluate(objective, every, scope) for _ in range(2))
        twice = tokens.evaluate(objective, torch.cat((every, every)), scope)
        if scope != "batch":
            nothing = tokens.evaluate(objective, every[:0], scope)
            parts = [tokens.evaluate(objective, part, scope) for part in _parts(scope)]
    except Exception as error:  # a user's objective may raise anything
        yield _raised(name, error)
        return
    try:
        tokens.evaluate(objective, every, scope, bare=True)
    except ValueError:
        pass  # the objective says which input it needs
    except Exception as error:
        yield (
            f"{_raised(name, error)}, where the inputs that a run need not have are None: log-probs of a reference and "
            "of the policy before the update, weights. If it needs one, let it raise ValueError"
        )
    for key, value in whole[1].items():
        if value.requires_grad:
            yield f"{name} returns the sum '{key}' with a gradient; detach it"
    kinds = {"loss": whole[0], "gradient": whole[2], **whole[1]}
    if strange := [what for what, values in kinds.items() if not torch.isfinite(values).all()]:
        yield from (f"{name} returns a {what} that is not finite, on log-probs between -3 and 0" for what in strange)
        return  # and cannot be compared
    if float(whole[0]) != float(again[0]) or not torch.equal(whole[2], again[2]):
        yield (
            f"{name} is not deterministic: its loss is {float(whole[0]):.9g} and then {float(again[0]):.9g} for the "
            "same tokens, or its gradient differs; draw by the field seed, which each SGD step sets"
        )
        return
    means = list(_means(name, whole, twice))
    yield from means
    if not means and scope != "batch":
        yield from _not_additive(name, scope, whole, parts)
        if float(nothing[0]) != 0:
            yield f"{name} returns {float(nothing[0]):.6g} for no tokens; expected 0"


def _raised(name: str, error: Exception) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{name} raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"


def _means(name: str, whole: Result, twice: Result) -> Iterator[str]:
    """Yield a sentence for each value and gradient that behaves like a mean when all tokens are evaluated twice."""
    for what, once, both in _values(whole, twice):
        if not what.startswith(_LARGEST) and (once - both).abs() < (2 * once - both).abs():
            yield (
                f"{name} returns a mean: {what} is {float(once):.6g} for some tokens and {float(both):.6g} for twice "
                f"as many of the same; {_ADVICE}"
            )
    for what, once, both in zip(("log-probs", "entropies"), whole[2], twice[2], strict=True):
        half = torch.cat((once, once)) / 2
        if (both - half).norm() < (both - 2 * half).norm():
            yield (
                f"{name} has a mean in its loss: its gradient by the {what} is half as large for twice as many of the "
                f"same tokens; {_ADVICE}"
            )


def _not_additive(name: str, scope: Scope, whole: Result, parts: list[Result]) -> Iterator[str]:
    """Yield sentences about the values and gradients that change if the tokens are evaluated in two parts."""
    unit = "token" if scope == "token" else "sequence"
    advice = f'a term depends on more than its {unit}; give the objective a wider scope than "{scope}"'
    for what, value, *of_parts in _values(whole, *parts):
        together = torch.stack(of_parts).amax() if what.startswith(_LARGEST) else sum(of_parts)
        if not torch.isclose(together, value, rtol=_TOLERANCE, atol=_TOLERANCE):
            yield f"{name}: {what} is {float(value):.9g} at once and {float(together):.9g} in two parts: {advice}"
    gradients = torch.cat([part[2] for part in parts], dim=1)
    if not torch.allclose(gradients, whole[2], rtol=_TOLERANCE, atol=_TOLERANCE):
        yield f"{name}: gradients differ between tokens taken at once and in two parts: {advice}"


def _values(*results: Result) -> Iterator[tuple[Any, ...]]:
    """Yield, for the loss and for each sum, its name in words and then its value in each of ``results``."""
    yield "its loss", *(loss for loss, _, _ in results)
    for key in results[0][1]:
        yield f"the sum '{key}'", *(sums[key].double() for _, sums, _ in results)


def _parts(scope: Scope) -> list[Tensor]:
    """Return the indices of two parts of the tokens. Only with scope "token" may a sequence be cut in two."""
    at = sum(_LENGTHS[:3]) + (2 if scope == "token" else 0)
    return [torch.arange(at), torch.arange(at, sum(_LENGTHS))]


def _at(inputs: TokenInputs, indices: Tensor, scope: Scope) -> TokenInputs:
    """Return the inputs of the tokens at ``indices``, which must be of whole sequences unless the scope is "token"."""
    whole = inputs.whole
    picked = inputs[indices]
    if scope == "token":
        return picked
    count, copies = len(whole.lengths), torch.arange(len(indices)) // sum(_LENGTHS)
    named, index = (whole.index[indices] + count * copies).unique_consecutive(return_inverse=True)
    return replace(picked, sequences=Sequences(index, whole.lengths[named % count]))
