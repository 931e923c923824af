"""The configuration schema of an ``or1 data build`` recipe, strict like a run's. Defaults are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from or1_megatron.config.schema import (
    AskedModelConfig,
    Fraction,
    NonNegative,
    Positive,
    PositiveFloat,
    ProblemSetConfig,
    Section,
)


class BuildSource(ProblemSetConfig):
    """One problem set as published. Its ``name`` (unset: the name of the file or folder) becomes part of
    ``data_source``. The row's own source column follows, if there is one, as in train-math-numinamath1.5_olympiads."""

    subset: str | None = None
    """Configuration (subset) of a set on the hub."""
    select: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    """Take only data rows whose column has one of these values, e.g. {source: [olympiads, aops_forum]}."""


class VerifiedStepConfig(Section):
    timeout_s: PositiveFloat = 5.0
    """Deadline of one verdict."""
    workers: Positive = 1
    """Number of verifiers that work at once."""


class EmbeddingConfig(Section):
    """Exclusion by cosine similarity of mean-pooled hidden states. The paper gives neither model nor threshold."""

    model: Path
    """Local folder of any encoder or decoder that the library transformers can load."""
    threshold: Fraction = 0.95
    abilities: tuple[str, ...] = ("code",)
    """Only problems of these abilities are compared with each other. The paper compares code problems."""


class DuplicatesConfig(Section):
    """Exclusion of near-duplicates by MinHash; the defaults are ours, because the paper gives none."""

    threshold: Fraction = 0.5
    """Problems are near-duplicates if their statements' 5-character shingles have at least this Jaccard similarity."""
    embedding: EmbeddingConfig | None = None


class DecontaminationConfig(Section):
    against: tuple[BuildSource, ...] = ()
    ngram_words: Positive = 8
    overlap: Fraction = 0.5
    """A problem is excluded if at least this share of the shorter text's n-grams is in the other text too."""


class SampledModel(AskedModelConfig):
    """A model that a build asks: an HF folder on our own engines, or an OpenAI-compatible endpoint."""

    name: str
    """The model's key in ``model_difficulty`` and in the names of result files."""
    hf: Path | None = None
    endpoint: str | None = None
    """Base URL, e.g. http://host:8000/v1; requests go to its /chat/completions."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one request to the endpoint."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.hf is None) == (self.endpoint is None):
            raise ValueError(f"model '{self.name}': expected either hf (our engines) or endpoint, and not both")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"model '{self.name}': endpoint: found '{self.endpoint}', expected http://host:port/v1")
        return self


class SampledStepConfig(Section):
    models: tuple[SampledModel, ...] = Field(min_length=1)
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    seed: NonNegative = 1


class DifficultyConfig(SampledStepConfig, VerifiedStepConfig):
    """Measurement of how often each model fails at each problem (docs/recipe.md, section 7)."""

    samples_math: Positive = 16
    samples_code: Positive = 8
    max_prompt_tokens: Positive = 2048
    max_response_tokens: Positive = 32768


class JudgesConfig(SampledStepConfig):
    """Quality votes. In the paper, two 70B-class judges vote 16 times each, on math problems only."""

    votes: Positive = 16
    """Number of votes of each model per problem."""
    keep_at_least: Positive = 9
    """A problem is kept if at least this many votes, of all models together, are in favour."""
    max_prompt_tokens: Positive = 4096
    max_response_tokens: Positive = 2048

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.keep_at_least > self.votes * len(self.models):
            raise ValueError(
                f"judges: keep_at_least = {self.keep_at_least} is more than votes * models = {self.votes} * "
                f"{len(self.models)}; nothing could be kept"
            )
        return self


class Recipe(Section):
    """The recipe of a whole build. Steps that ask a model (difficulty, judges) run only if their section is given."""

    out: Path = Field(default=Path("runs/dataset"), validate_default=False)  # strict JSON has no paths
    sources: tuple[BuildSource, ...] = Field(min_length=1)
    unusable: Literal["refuse", "drop"] = "refuse"
    """What to do with data rows that do not fit their source's columns. refuse: list them, stop; drop: exclude them."""
    answers: VerifiedStepConfig | None = VerifiedStepConfig()
    """Math: keep problems whose worked solution gives the stated answer, or that have no solution. null: no check."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    decontaminate: DecontaminationConfig = DecontaminationConfig()
    code: VerifiedStepConfig | None = VerifiedStepConfig()
    """Code: keep problems if one of the first three reference solutions passes every test. null: no check."""
    difficulty: DifficultyConfig | None = None
    judges: JudgesConfig | None = None
