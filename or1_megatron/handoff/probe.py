"""The probe of a handoff: compares the log-probs of engines and policy on fixed tokens.

In float32 no token may differ by more than a bound. In bfloat16 single tokens differ by tenths of a nat without any
fault, but their mean over many tokens hardly changes. So the mean is compared with the mean of the first handoff.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.failures import HandoffMismatch
from or1_megatron.types import Float32Array, Int32Array

_SEED = 20250522
_LONGEST = 512
"""Most tokens of a probe sequence. Several sequences cost less than one long sequence."""
_SCORED = {"float32": 94, "bfloat16": 512}  # tokens, unless the configuration says otherwise
_BOUND = {"float32": 1e-3, "bfloat16": 0.1}  # nats


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Largest and mean |engine - policy| of the probe's log-probs, in nats, each the maximum over the engines."""

    largest: float
    mean: float


def probe_tokens(vocab_size: int, length: int, sequences: int = 2) -> list[Int32Array]:
    """Return ``sequences`` arrays [length] of pseudo-random token ids, equal for every run, engine and rank.

    Random ids touch more rows of the embedding table than a text of this length.
    """
    generator = np.random.default_rng(_SEED)
    return [generator.integers(0, vocab_size, size=length, dtype=np.int32) for _ in range(sequences)]


class Probe:
    """Holds a run's probe tokens, and judges the differences between engines and policy."""

    def __init__(
        self, config: HandoffConfig, dtype: Literal["float32", "bfloat16"], vocab_size: int, longest: int
    ) -> None:
        """``longest``: the most tokens that prompt and response together may have in an engine."""
        scored = config.probe_tokens or _SCORED[dtype]
        length = max(2, min(math.ceil(scored / 2) + 1, longest - 1, _LONGEST))
        self.token_ids = probe_tokens(vocab_size, length, math.ceil(scored / (length - 1)))
        """Token ids of the sequences. All tokens of a sequence except the first are scored."""
        self._dtype = dtype
        self._bound = config.probe_bound or _BOUND[dtype]
        self._growth = config.probe_growth
        self._baseline: float | None = None

    def judge(self, engines: Sequence[Sequence[Float32Array]], policy: Sequence[Float32Array]) -> ProbeResult:
        """Compare the log-probs of one handoff. In bfloat16, later handoffs are compared with the run's first handoff.

        Raises:
            HandoffMismatch: engine and policy differ too much.
        """
        exact = self._dtype == "float32"
        largest = compare_probe(engines, policy, self._bound if exact else math.inf)
        means = [_mean(scores, policy) for scores in engines]
        result = ProbeResult(largest, max(means))
        if exact:
            return result
        bound, what = self._bound, "handoff.probe_bound"
        if self._baseline is not None:
            bound = self._growth * self._baseline
            what = f"handoff.probe_growth = {self._growth:g} times the {self._baseline:.3g} of the run's first handoff"
        if not result.mean <= bound:
            raise HandoffMismatch(
                f"handoff: engine {means.index(result.mean)} does not compute what the policy computes: over "
                f"{sum(map(len, policy))} probe tokens their log-probs differ by {result.mean:.3g} on average; the "
                f"bound ({what}) is {bound:.3g}"
            )
        self._baseline = self._baseline or result.mean
        return result


def _mean(scores: Sequence[Float32Array], policy: Sequence[Float32Array]) -> float:
    differences = [np.abs(theirs.astype(np.float64) - ours) for theirs, ours in zip(scores, policy, strict=True)]
    return float(np.concatenate(differences).mean())


def compare_probe(engines: Sequence[Sequence[Float32Array]], policy: Sequence[Float32Array], bound: float) -> float:
    """Return the largest |engine - policy| log-prob over all engines, sequences and positions.

    Args:
        engines: for each engine and each sequence of p tokens, the log-probs [p - 1] of all tokens except the first, at
            temperature 1.
        policy: for each sequence, the policy's log-probs [p - 1].
        bound: the largest tolerated difference; infinite: any finite difference is tolerated.

    Raises:
        HandoffMismatch: a difference is above ``bound`` or not finite. The message names the engine and worst position.
        ValueError: the lists do not have the same shapes.
    """
    largest = 0.0
    for index, scores in enumerate(engines):
        if [len(s) for s in scores] != [len(p) for p in policy]:
            raise ValueError(
                f"probe: engine {index} scored {[len(s) for s in scores]} tokens, the policy {[len(p) for p in policy]}"
            )
        for sequence, (theirs, ours) in enumerate(zip(scores, policy, strict=True)):
            difference = np.abs(np.asarray(theirs, dtype=np.float64) - np.asarray(ours, dtype=np.float64))
            difference = np.where(np.isnan(difference), np.inf, difference)
            worst = int(difference.argmax())
            if not difference[worst] <= bound or np.isinf(difference[worst]):
                raise HandoffMismatch(
                    f"handoff: engine {index} does not compute what the policy computes. Worst of {len(difference)} "
                    f"probe tokens in sequence {sequence}: token {worst + 1}, log-prob {theirs[worst]:.6f} in the "
                    f"engine, {ours[worst]:.6f} in the policy; they differ by {difference[worst]:.3g}, the bound "
                    f"(handoff.probe_bound) is {bound:.3g}"
                )
            largest = max(largest, float(difference[worst]))
    return largest
