"""The recipe of ``or1 data build``: typed and strict, like a run's configuration. Defaults are the paper's."""

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
    """One problem set as published. Its ``name`` (unset: that of the file or folder) is part of ``data_source``; a
    layout with its own source adds that, as in train-math-numinamath1.5_olympiads."""

    subset: str | None = None
    """Configuration of a hub id."""
    select: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    """Takes only rows whose column has one of these values, e.g. {source: [olympiads, aops_forum]}."""


class VerifiedStepConfig(Section):
    timeout_s: PositiveFloat = 5.0
    """Deadline of one verdict."""
    workers: Positive = 1
    """Verifiers at once."""


class EmbeddingConfig(Section):
    """Duplicates by meaning: cosine of mean-pooled hidden states."""

    model: Path
    """A local folder: any encoder or decoder that transformers loads."""
    threshold: Fraction = 0.95
    abilities: tuple[str, ...] = ("code",)
    """The paper removes near-duplicates of code by embeddings, and gives no model and no threshold."""


class DuplicatesConfig(Section):
    """Near-duplicates by MinHash; the figures are ours, the paper gives none."""

    threshold: Fraction = 0.5
    """Jaccard similarity of the statements' 5-character shingles."""
    embedding: EmbeddingConfig | None = None


class DecontaminationConfig(Section):
    against: tuple[BuildSource, ...] = ()
    ngram_words: Positive = 8
    overlap: Fraction = 0.5
    """Share of the shorter text's n-grams that the other text must have too."""


class SampledModel(AskedModelConfig):
    """A model that answers: an HF folder on our own engines, or an OpenAI-compatible endpoint."""

    name: str
    """The model's key in ``model_difficulty`` and in the names of result files."""
    hf: Path | None = None
    endpoint: str | None = None
    """E.g. http://host:8000/v1; its /chat/completions is asked."""
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
    """How often each model fails; RECIPE section 7."""

    samples_math: Positive = 16
    samples_code: Positive = 8
    max_prompt_tokens: Positive = 2048
    max_response_tokens: Positive = 32768


class JudgesConfig(SampledStepConfig):
    """Quality votes. The paper: two 70B-class judges, 16 votes each, at least 9 of the 32 in favour, only for math."""

    votes: Positive = 16
    """Votes of each model per problem."""
    keep_at_least: Positive = 9
    """Votes in favour that keep a problem, over all models."""
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
    """A whole build. Steps that need a model (difficulty, judges) are left out unless their section is given."""

    out: Path = Field(default=Path("runs/dataset"), validate_default=False)  # strict JSON has no paths
    sources: tuple[BuildSource, ...] = Field(min_length=1)
    unusable: Literal["refuse", "drop"] = "refuse"
    """Rows that do not fit their source's layout. refuse: the build lists them and stops; drop: the ledger has them."""
    answers: VerifiedStepConfig | None = VerifiedStepConfig()
    """Extract the answer again from the worked solution; keep problems that agree or have no solution."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    decontaminate: DecontaminationConfig = DecontaminationConfig()
    code: VerifiedStepConfig | None = VerifiedStepConfig()
    """One of the first three reference solutions must pass every test in the sandbox."""
    difficulty: DifficultyConfig | None = None
    judges: JudgesConfig | None = None
