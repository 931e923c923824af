"""The configuration schema of ``or1 eval``; defaults are the paper's: 32,768 tokens, temperature 1, top-p 1."""

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
    """The verifiers' settings as in training, but with two workers by default."""

    workers: Positive = 2


class EvaluationSettings(AskedModelConfig):
    """The settings of an evaluation. A file of configs/eval and ``--set`` replace defaults."""

    max_response_tokens: Positive | None = None
    """Longest response. Unset: 32,768 as in the paper, or the model's context minus the longest prompt if less."""
    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    seed: NonNegative = 20250522
    max_prompt_tokens: Positive = 8192
    """Longest prompt; a problem with a longer prompt is not sampled, and all its responses count as wrong."""
    request_timeout_s: PositiveFloat = 3600.0
    """Time limit of one request to an endpoint."""
    verify: EvaluationVerifyConfig = EvaluationVerifyConfig()
    """Settings of the verifiers. The evaluation fails if more than ``max_error_fraction`` of the verdicts have status
    ``error`` or ``timeout``; responses are kept."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """What to do with data rows that cannot be used, e.g. if a verifier cannot read their ground truth. refuse: list
    them and stop; drop: leave them out, counted by reason."""
