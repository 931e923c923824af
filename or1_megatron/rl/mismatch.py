"""How far the engines' distribution is from the policy's, by several measures of the responses that are trained on.

d is log pi_policy - log pi_engine of a sampled token, s its sum over a response, w = e^d and W = e^s the importance
weights of a token and of a response. Shapes: [n] per response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from or1_megatron.types import Float32Array, UpdateReport

_LARGEST: Final = 20.0
"""|d| and |s| are clamped to this in exponents."""


def measured_mismatch(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """Return ``mismatch/mean_abs``, ``max_abs`` and ``kl`` as an on-policy update measured them over its tokens, nats.

    Empty if all were skipped, if there was none, or if an objective of the user's does not measure them. kl: the
    k3 estimate of KL(engine || policy).
    """
    done = [update for update in updates if not update.skipped]
    if not done or "abs_log_ratio" not in done[0].sums:
        return {}
    tokens = sum(update.token_count for update in done)
    return {
        "mismatch/mean_abs": sum(update.sums["abs_log_ratio"] for update in done) / tokens,
        "mismatch/max_abs": max(update.sums["max_abs_log_ratio"] for update in done),
        "mismatch/kl": sum(update.sums["approx_kl"] for update in done) / tokens,
    }


def scored_mismatch(engine: Sequence[Float32Array], policy: Sequence[Float32Array]) -> dict[str, float]:
    """Return the same from a scoring pass, over at least one token."""
    difference = np.concatenate(policy).astype(np.float64) - np.concatenate(engine).astype(np.float64)
    return {
        "mismatch/mean_abs": float(np.abs(difference).mean()),
        "mismatch/max_abs": float(np.abs(difference).max()),
        "mismatch/kl": float((np.expm1(difference) - difference).mean()),
    }


def mismatch_metrics(engine: Sequence[Float32Array], policy: Sequence[Float32Array]) -> dict[str, float]:
    """Return the metrics ``mismatch/...`` of responses with at least one token each; none without a response.

    k1: mean of -d, the plain estimate of KL(engine || policy). perplexity_ratio: the policy's perplexity of a response
    over the engine's, e^(mean of -d), mean over responses. chi_square: mean of w^2, less 1. effective_sample_size:
    (sum w)^2 / (n sum w^2), 1 where all weights are equal. The same of s and W: sequence_log_ratio (mean |s|),
    sequence_chi_square, sequence_effective_sample_size.

    Worked example: d is ln 2 and -ln 2 in one response, ln 2 in another. k1 = -ln 2 / 3. Perplexity ratios e^0 = 1 and
    1 / 2: mean 3 / 4. w is 2, 1/2, 2: chi_square = 8.25 / 3 - 1 = 1.75, effective_sample_size = 4.5^2 / (3 * 8.25) =
    0.818. s is 0 and ln 2, W is 1 and 2: mean |s| = ln 2 / 2, chi_square 5 / 2 - 1 = 1.5, size 9 / (2 * 5) = 0.9.
    """
    if not engine:
        return {}
    ratios = [mine.astype(np.float64) - theirs for mine, theirs in zip(policy, engine, strict=True)]
    tokens = np.concatenate(ratios)
    sequences = np.array([ratio.sum() for ratio in ratios])
    mean_ratios = np.array([ratio.mean() for ratio in ratios])
    measures = {
        "k1": -tokens.mean(),
        "perplexity_ratio": np.exp(np.clip(-mean_ratios, -_LARGEST, _LARGEST)).mean(),
        "sequence_log_ratio": np.abs(sequences).mean(),
    }
    for prefix, log_weights in (("", tokens), ("sequence_", sequences)):
        measures[f"{prefix}chi_square"], measures[f"{prefix}effective_sample_size"] = _spread(log_weights)
    return {f"mismatch/{name}": float(value) for name, value in measures.items()}


def _spread(log_weights: NDArray[np.float64]) -> tuple[float, float]:
    """Return (chi-square, effective sample size over the number of samples) of importance weights."""
    weights = np.exp(np.clip(log_weights, -_LARGEST, _LARGEST))
    square = float((weights**2).mean())
    return square - 1.0, float(weights.mean()) ** 2 / square
