"""Proof that a handoff arrived: the engines' log-probs of fixed tokens against the policy's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from or1_megatron.types import Float32Array, Int32Array


class HandoffMismatch(RuntimeError):
    """An engine does not compute what the policy computes."""


def probe_tokens(vocab_size: int, length: int, sequences: int = 2) -> list[Int32Array]:
    """Fixed pseudo-random token ids, [length] each: the same for every run, engine and rank.

    Any text would do; random ids touch more rows of the embedding than sentences of the same length.
    """
    generator = np.random.default_rng(20250522)
    return [generator.integers(0, vocab_size, size=length, dtype=np.int32) for _ in range(sequences)]


def compare_probe(engines: Sequence[Sequence[Float32Array]], policy: Sequence[Float32Array], bound: float) -> float:
    """Largest |engine - policy| log-prob over all engines, sequences and positions.

    Args:
        engines: per engine, per sequence [p - 1]: log-prob of tokens 1.. given those before, temperature 1.
        policy: the same of the policy, per sequence.
        bound: largest difference that is let through.

    Raises:
        HandoffMismatch: a difference above ``bound`` or not a number; names the engine and the worst position.
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
            if not difference[worst] <= bound:
                raise HandoffMismatch(
                    f"handoff: engine {index} does not compute what the policy computes. Worst of {len(difference)} "
                    f"probe tokens in sequence {sequence}: token {worst + 1}, log-prob {theirs[worst]:.6f} in the "
                    f"engine, {ours[worst]:.6f} in the policy; they differ by {difference[worst]:.3g}, the bound "
                    f"(handoff.probe_bound) is {bound:.3g}"
                )
            largest = max(largest, float(difference[worst]))
    return largest
