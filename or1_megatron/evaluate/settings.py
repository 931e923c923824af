"""The settings of an evaluation; the defaults are the paper's: 32,768 tokens, temperature 1, top-p 1."""

from __future__ import annotations

from typing import Final, Literal

from or1_megatron.config.schema import (
    AskedModelConfig,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)
from or1_verify.config import VerifyConfig

PAPER_RESPONSE_TOKENS: Final = 32768


class EvaluationVerifyConfig(VerifyConfig):
    """As in training, but with two workers."""

    workers: Positive = 2


class EvaluationSettings(AskedModelConfig):
    """A file of configs/eval, or ``--set`` on top of the defaults."""

    max_response_tokens: Positive | None = None
    """None: 32,768 as in the paper, or less where the longest prompt leaves less of the model's context."""
    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    seed: NonNegative = 20250522
    max_prompt_tokens: Positive = 8192
    """A longer prompt is not sampled, and counts as wrong in all of its samples."""
    request_timeout_s: PositiveFloat = 3600.0
    """Limit of one request to an endpoint."""
    verify: EvaluationVerifyConfig = EvaluationVerifyConfig()
    """The evaluation fails when a larger share of the verdicts than ``max_error_fraction`` failed
    (``error``, ``timeout``); responses are kept."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """Rows that cannot be used, e.g. a ground truth that its verifier cannot read. refuse: list them and stop; drop:
    leave them out and say how many, by reason."""
