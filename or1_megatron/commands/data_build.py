"""The composition root of ``or1 data build``: verifiers, engines and endpoints for the pipeline's ports."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    """Raises ConfigError of the recipe, and what ``pipeline.build.build`` raises."""
    recipe = load_as(Recipe, path, overrides)
    for model in _models(recipe):
        _check_model(model)
    return build(recipe, make_verifiers, open_sampler, say, until)


def make_verifiers(timeout_s: float, abilities: frozenset[str]) -> Mapping[str, Verifier]:
    return build_verifiers(VerifyConfig(timeout_s=timeout_s), abilities)


@contextmanager
def open_sampler(model: SampledModel, sampling: Sampling, max_prompt_tokens: int) -> Iterator[Sampler]:
    """An endpoint, or engines that end with the context. The endpoint itself judges what prompt is too long."""
    if model.hf is None:
        yield endpoint_sampler(model, sampling)
        return
    import torch

    from or1_megatron.data.template import ChatTemplate, load_tokenizer
    from or1_megatron.rollout.cluster import start_ray, stop_ray
    from or1_megatron.rollout.engine_sampler import EngineSampler
    from or1_megatron.rollout.pool import EnginePool

    template = ChatTemplate(load_tokenizer(model.hf))
    run_id = f"data-{uuid.uuid4().hex[:8]}"
    longest = max_prompt_tokens + sampling.max_response_tokens
    start_ray(None, run_id)
    try:
        on_cpu = not torch.cuda.is_available()
        pool = EnginePool(model.engines, model.hf, model.dtype, longest, run_id, on_cpu)
        try:
            pool.wait_ready()
            room = model.engines.max_concurrent
            yield EngineSampler(
                pool.handles, room, template.token_ids, sampling, max_prompt_tokens, model.engines.step_timeout_s
            )
        finally:
            pool.close()
    finally:
        stop_ray()


def endpoint_sampler(model: SampledModel, sampling: Sampling) -> OpenAISampler:
    assert model.endpoint is not None
    key = os.environ.get(model.api_key_variable) if model.api_key_variable else None
    endpoint = Endpoint(model.endpoint, model.model or model.name, key, model.concurrent, model.timeout_s, model.tries)
    return OpenAISampler(endpoint, sampling)


def _models(recipe: Recipe) -> list[SampledModel]:
    asking = [section for section in (recipe.difficulty, recipe.judges) if section is not None]
    return [model for section in asking for model in section.models]


def _check_model(model: SampledModel) -> None:
    """At the door: what would otherwise be found out after hours of other steps."""
    if model.hf is not None and not (model.hf / "config.json").is_file():
        raise DataError(f"model '{model.name}': {model.hf} is not an HF model folder (no config.json)")
    if model.api_key_variable is not None and not os.environ.get(model.api_key_variable):
        raise DataError(
            f"model '{model.name}': environment variable {model.api_key_variable}, which should hold its key, isn't set"
        )
