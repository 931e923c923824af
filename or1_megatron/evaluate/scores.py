"""Computes the scores of ``or1 eval``: avg@k and pass@k with intervals, accuracy by response length and by budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from or1_megatron.evaluate.pass_at_k import Score, passed, sizes
from or1_megatron.evaluate.response_store import EvaluationError, Response

BUDGETS: Final = (512, 1024, 2048, 4096, 8192, 12288, 16384, 20480, 24576, 28672, 32768, 49152, 65536)
_BINS: Final = 8


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Number and accuracy of the responses that have ``low`` to ``high`` - 1 tokens."""

    low: int
    high: int
    responses: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """The scores of an evaluation of P problems with n responses each."""

    problems: int
    samples: int
    average: Score
    """avg@n with its intervals."""
    passed: Mapping[int, Score]
    """Maps k to pass@k. The keys are powers of two below n, and n."""
    truncation_ratio: float
    mean_tokens: float | None
    statuses: Mapping[str, int]
    by_length: Sequence[LengthBin]
    """Accuracy in bins of response length with about equal counts, as in the paper's figure 5."""
    by_budget: Mapping[int, float]
    """Maps a budget in tokens to avg@n with all longer responses counted as wrong (the paper's figure 8)."""


def summarise(responses: Sequence[Sequence[Response]], limit_tokens: int) -> EvaluationScores:
    """Return the scores of responses [P][n]. ``limit_tokens``: the limit of a response; also the largest budget."""
    right = np.array([[response.status == "right" for response in row] for row in responses], dtype=np.float64)
    flat = [response for row in responses for response in row]
    n = right.shape[1]
    lengths = [response.tokens for response in flat if response.tokens is not None]
    return EvaluationScores(
        problems=right.shape[0],
        samples=n,
        average=passed(right, 1),
        passed={k: passed(right, k) for k in sizes(n)},
        truncation_ratio=float(np.mean([response.truncated for response in flat])),
        mean_tokens=float(np.mean(lengths)) if lengths else None,
        statuses=dict(Counter(response.status for response in flat)),
        by_length=_by_length(flat),
        by_budget=_by_budget(flat, limit_tokens),
    )


def check_verdicts(outcome: EvaluationScores, max_error_fraction: float) -> None:
    """Raise EvaluationError if too many verdicts failed, because the score would then measure the verifier."""
    failed = outcome.statuses.get("error", 0) + outcome.statuses.get("timeout", 0)
    if failed > max_error_fraction * outcome.problems * outcome.samples:
        raise EvaluationError(
            f"{failed} of {outcome.problems * outcome.samples} verdicts failed ({dict(outcome.statuses)}), more than "
            f"verify.max_error_fraction = {max_error_fraction:g}; the responses are kept: look at them in "
            "responses.jsonl, raise verify.timeout_s, or score them again with or1-verify"
        )


def _by_length(responses: Sequence[Response]) -> list[LengthBin]:
    """Return bins between quantiles of the response lengths; fewer than 8 if many lengths are equal."""
    known = [(response.tokens, response.status == "right") for response in responses if response.tokens is not None]
    if not known:
        return []
    lengths, right = (np.array(column, dtype=np.float64) for column in zip(*known, strict=True))
    edges = np.unique(np.ceil(np.quantile(lengths, np.linspace(0, 1, _BINS + 1))).astype(int))
    edges[-1] += 1
    if len(edges) == 1:
        edges = np.array([edges[0] - 1, edges[0]])
    counts, rights = np.histogram(lengths, edges)[0], np.histogram(lengths, edges, weights=right)[0]
    return [
        LengthBin(low, high, int(count), float(of_them / count))
        for (low, high), count, of_them in zip(pairwise(edges.tolist()), counts, rights, strict=True)
        if count
    ]


def _by_budget(responses: Sequence[Response], limit_tokens: int) -> dict[int, float]:
    if any(response.tokens is None and response.status != "unasked" for response in responses):
        return {}
    budgets = [budget for budget in BUDGETS if budget < limit_tokens] + [limit_tokens]
    right = np.array([response.status == "right" for response in responses])
    tokens = np.array([response.tokens or 0 for response in responses])
    return {budget: float(np.where(tokens <= budget, right, 0.0).mean()) for budget in budgets}
