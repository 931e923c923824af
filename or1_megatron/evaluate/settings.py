"""How an evaluation is made; the defaults are the paper's: 32,768 tokens, temperature 1, top-p 1."""

from __future__ import annotations

from typing import Literal

from or1_megatron.config.schema import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    RolloutConfig,
    Section,
)


class EvaluationSettings(Section):
    """A file of configs/eval, or ``--set`` on top of the defaults."""

    max_response_tokens: Positive = 32768
    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    seed: NonNegative = 20250522
    max_prompt_tokens: Positive = 8192
    """A longer prompt is not asked, and counts as wrong in all of its samples."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    engines: RolloutConfig = RolloutConfig(placement="separate")
    model: str | None = None
    """An endpoint's name of the model; the first that it lists, if not given."""
    api_key_variable: str | None = None
    """The environment variable that holds the endpoint's key."""
    concurrent: Positive = 64
    """Requests under way at an endpoint."""
    request_timeout_s: PositiveFloat = 3600.0
    """Of one request to an endpoint."""
    tries: Positive = 4
    verify_timeout_s: PositiveFloat = 5.0
    """Of one verdict."""
    verify_workers: Positive = 2
    max_error_fraction: Fraction = 0.05
    """More verdicts than this that failed (``error``, ``timeout``) fail the evaluation; responses are kept."""
