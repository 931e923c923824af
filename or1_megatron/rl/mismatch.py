"""Training-inference mismatch: how far the engines' log-probs are from the policy's on the trained responses.

d is log pi_policy - log pi_engine of a sampled token, and s is the sum of d over a response. w = e^d and W = e^s are
the importance weights of a token and of a response. Shapes: [n] per response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from or1_megatron.types import Float32Array

_LARGEST: Final = 20.0
"""|d| and |s| are clamped to this value before exp()."""


def mismatch_metrics(
    engine: Sequence[Float32Array], policy: Sequence[Float32Array], stale: bool = False
) -> dict[str, float]:
    """Return the metrics ``mismatch/...`` of one or more responses, none of them empty.

    If a log-prob is not finite, returns {}; the SGD step is then skipped and reported. If the responses are ``stale``
    (older weights sampled them), mean_abs, max_abs and kl are left out. k1, mean_abs, max_abs and kl are in nats.

    k1: mean of -d, the plain estimate of KL(engine || policy). perplexity_ratio: e^(mean of -d) of a response, which is
    the policy's perplexity over the engine's; mean over responses. chi_square: mean of w^2, minus 1.
    sequence_chi_square: mean of W^2, minus 1. mean_abs, max_abs: mean and maximum of |d|. kl: mean of w - 1 - d, the k3
    estimate of KL(engine || policy).

    Worked example: d is ln 2 and -ln 2 in one response, ln 2 in another. k1 = -ln 2 / 3. Perplexity ratios e^0 = 1 and
    1 / 2: mean 3 / 4. w is 2, 1/2, 2: chi_square = 8.25 / 3 - 1 = 1.75. s is 0 and ln 2, W is 1 and 2:
    sequence_chi_square = 5 / 2 - 1 = 1.5. mean_abs = max_abs = ln 2, kl = 1.5 / 3 - ln 2 / 3 = 0.269.
    """
    ratios = [mine.astype(np.float64) - theirs for mine, theirs in zip(policy, engine, strict=True)]
    tokens = np.concatenate(ratios)
    if not np.isfinite(tokens).all():
        return {}
    sequences = np.array([ratio.sum() for ratio in ratios])
    mean_ratios = np.array([ratio.mean() for ratio in ratios])
    measures = {
        "k1": -tokens.mean(),
        "perplexity_ratio": _exp(-mean_ratios).mean(),
        "chi_square": (_exp(tokens) ** 2).mean() - 1.0,
        "sequence_chi_square": (_exp(sequences) ** 2).mean() - 1.0,
    }
    if not stale:
        measures |= {
            "mean_abs": np.abs(tokens).mean(),
            "max_abs": np.abs(tokens).max(),
            "kl": (np.expm1(np.clip(tokens, -_LARGEST, _LARGEST)) - tokens).mean(),
        }
    return {f"mismatch/{name}": float(value) for name, value in measures.items()}


def _exp(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(np.clip(log_weights, -_LARGEST, _LARGEST))
