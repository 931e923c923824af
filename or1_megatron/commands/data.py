"""``or1 data build``: the pipeline joined to verifiers, engines and endpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from or1_megatron.config.load import load_as
from or1_megatron.config.schema import VerifyConfig
from or1_megatron.data.pipeline.build import Done, build
from or1_megatron.data.pipeline.recipe import Recipe, SampledModel
from or1_megatron.data.pipeline.steps import Say
from or1_megatron.data.rows import DataError
from or1_megatron.interfaces import Sampler, Verifier
from or1_megatron.rollout.openai_sampler import Endpoint, OpenAISampler
from or1_megatron.types import Sampling
from or1_megatron.verify.registry import build_verifiers


def build_dataset(path: Path, overrides: tuple[str, ...], say: Say, until: str | None = None) -> list[Done]:
    """Build as the recipe at ``path`` says. Raises ConfigError, and what ``pipeline.build.build`` raises."""
    recipe = load_as(Recipe, path, overrides)
    for section in (recipe.difficulty, recipe.judges):
        for model in () if section is None else section.models:
            _check_model(model)
    return build(recipe, make_verifiers, partial(open_sampler, say=say), say, until)


def make_verifiers(timeout_s: float, abilities: frozenset[str]) -> Mapping[str, Verifier]:
    return build_verifiers(VerifyConfig(timeout_s=timeout_s), abilities)


@contextmanager
def open_sampler(
    model: SampledModel, sampling: Sampling, max_prompt_tokens: int, say: Say = print
) -> Iterator[Sampler]:
    """Open an endpoint, which judges itself what prompt is too long, or engines that end with the context."""
    if model.endpoint is not None:
        key = os.environ.get(model.api_key_variable) if model.api_key_variable else None
        name = model.model or model.name
        yield OpenAISampler(
            Endpoint(model.endpoint, name, key, model.concurrent, model.timeout_s, model.tries), sampling
        )
        return
    assert model.hf is not None
    from or1_megatron.commands.local_model import LocalModel

    local, longest = LocalModel(model.hf), max_prompt_tokens + sampling.max_response_tokens
    requests = model.engines.engines * model.engines.max_concurrent
    engines, chosen = local.fit_kv_cache(model.dtype, model.engines, longest, requests)
    if chosen:
        say(f"{model.name}: {chosen}")
    with local.sampler(model.dtype, engines, longest, sampling, max_prompt_tokens) as sampler:
        yield sampler


def _check_model(model: SampledModel) -> None:
    """Refuse at once what would otherwise be found after hours of other steps."""
    if model.hf is not None and not (model.hf / "config.json").is_file():
        raise DataError(f"model '{model.name}': {model.hf} is not an HF model folder (no config.json)")
    if model.api_key_variable is not None and not os.environ.get(model.api_key_variable):
        raise DataError(
            f"model '{model.name}': environment variable {model.api_key_variable}, which should hold its key, isn't set"
        )
