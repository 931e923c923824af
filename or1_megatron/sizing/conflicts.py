"""Finds conflicts of a configuration with a model or between its sections, and says how to resolve each.

Rules within one section (D_T divides D_R, ranks = TP x PP x CP x DP) are checked by the sections of ``config``, and
``memory`` says whether a run fits in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal

from or1_megatron.config.schema import Config, ParallelConfig, StageConfig
from or1_megatron.rl.objectives.registry import objective_conflicts
from or1_megatron.schemas.metrics import is_metric
from or1_megatron.sizing.kv_cache import shared_kv_cache_bytes
from or1_megatron.weights.shape import Shape
from or1_megatron.weights.table import Experts

Device = Literal["cpu", "cuda"]

CPU_HEAD_DIMS: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of vLLM 0.32's CPU attention (its ``get_supported_head_sizes``)."""
CPU_LINEAR_ATTENTION: Final = (("bfloat16", 64, 64), ("bfloat16", 128, 128))
"""(dtype, channels of a key head, channels of a value head) that vLLM's linear attention on CPU supports."""


def conflicts(config: Config, shape: Shape, problems: Sequence[int] | None, device: Device) -> Iterator[str]:
    """Yield a line for each reason why ``config`` cannot work. ``problems``: number of problems per training source."""
    yield from layout_conflicts(config.parallel, shape)
    yield from _length_conflicts(config, shape)
    yield from _engine_conflicts(config, shape, device)
    yield from _batch_conflicts(config, problems, device)
    yield from _algorithm_conflicts(config)


def padded_sequence(config: Config, stage: StageConfig) -> int:
    """Return a stage's longest prompt + response in tokens, rounded up as packed rows are: to 2 * CP * TP."""
    multiple = 2 * config.parallel.context * config.parallel.tensor
    return -(-(config.data.max_prompt_tokens + stage.max_response_tokens) // multiple) * multiple


def longest_row(config: Config) -> int:
    """Return the padded length in tokens of the longest prompt + response of all stages."""
    return max(padded_sequence(config, stage) for stage in config.stages)


def kv_tokens(config: Config, shape: Shape) -> int | None:
    """Return how many tokens one engine's KV cache holds; None if vLLM chooses the cache's size."""
    size = config.rollout.kv_cache_bytes
    size = shared_kv_cache_bytes(config, shape) if size is None else size
    if size is None:
        return None
    cut = min(config.rollout.tensor_parallel, shape.kv_heads)
    return max(0, size - engine_state_bytes(config, shape)) * cut // shape.kv_bytes_per_token(config.model.dtype)


def engine_state_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes of a rank's KV cache that delta nets and windows take for ``max_concurrent`` sequences."""
    rollout = config.rollout
    return rollout.max_concurrent * shape.state_bytes(config.model.dtype) // rollout.tensor_parallel


def head_conflicts(key: str, tensor: int, shape: Shape) -> Iterator[str]:
    """Yield a line if ``tensor`` ranks cannot share the model's heads; ``key`` is the configuration key to name."""
    if shape.heads % tensor:
        yield (
            f"{key} = {tensor} does not divide the model's num_attention_heads = {shape.heads}; sizes that do: "
            f"{_divisors(shape.heads)}"
        )
    # With fewer key/value heads than ranks, vLLM copies each head to the same number of ranks. Megatron cuts the weight
    # within heads and gathers the activations before attention, so ranks that share a head compute with the same head.
    elif shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield (
            f"{key} = {tensor} neither divides the model's num_key_value_heads = {shape.kv_heads} nor is a multiple of "
            f"it; choose a divisor ({_divisors(shape.kv_heads)}) or a multiple"
        )


def layout_conflicts(parallel: ParallelConfig, shape: Shape) -> Iterator[str]:
    """Yield a line for each reason why a parallel layout cannot divide a model of this shape."""
    tensor = parallel.tensor
    yield from head_conflicts("parallel.tensor", tensor, shape)
    experts = shape.experts
    divided = []
    if experts is None or len(experts.layers) < shape.layers:
        divided.append(("intermediate_size", shape.intermediate))
    if experts is not None:
        divided.append(("moe_intermediate_size", experts.intermediate))
        divided += [("shared_expert_intermediate_size", experts.shared)] * bool(experts.shared)
    if (latents := shape.latents) is not None:
        divided += [("q_lora_rank", latents.query), ("kv_lora_rank + qk_rope_head_dim", latents.key + latents.rotated)]
    for name, count in divided:
        if count % tensor:
            yield (
                f"parallel.tensor = {tensor} does not divide the model's {name} = {count}; "
                f"tensor sizes that do: {_divisors(count)}"
            )
    yield from _expert_conflicts(parallel, experts)
    if shape.delta_net is not None and shape.delta_net.key_heads % (tensor * parallel.context):
        yield (
            f"parallel.tensor * parallel.context = {tensor * parallel.context} does not divide the model's "
            f"linear_num_key_heads = {shape.delta_net.key_heads}; products that do: "
            f"{_divisors(shape.delta_net.key_heads)}"
        )
    try:
        parallel.chunk_layers(shape.layers)
    except ValueError as error:
        yield str(error)


def _expert_conflicts(parallel: ParallelConfig, experts: Experts | None) -> Iterator[str]:
    if experts is None:
        if parallel.expert > 1:
            yield f"parallel.expert = {parallel.expert}, but the model has no experts; set it to 1"
        return
    if experts.count % parallel.expert:
        yield (
            f"parallel.expert = {parallel.expert} does not divide the model's {experts.count} experts; sizes that do: "
            f"{_divisors(experts.count)}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield "parallel.tensor > 1 needs parallel.sequence=true for a mixture of experts: Megatron trains it only so"


def _length_conflicts(config: Config, shape: Shape) -> Iterator[str]:
    prompt, budget = config.data.max_prompt_tokens, config.parallel.micro_batch_tokens
    for stage in config.stages:
        total = prompt + stage.max_response_tokens
        if total > shape.positions:
            yield (
                f"stage '{stage.name}': data.max_prompt_tokens {prompt} + max_response_tokens "
                f"{stage.max_response_tokens} = {total} exceeds the {shape.positions} tokens that "
                "the model's max_position_embeddings and RoPE scaling allow; lower one of the two by "
                f"{total - shape.positions}"
            )
        if padded_sequence(config, stage) > budget:
            yield (
                f"stage '{stage.name}': parallel.micro_batch_tokens = {budget} is less than one sequence can need: "
                f"data.max_prompt_tokens {prompt} + max_response_tokens {stage.max_response_tokens}, padded = "
                f"{padded_sequence(config, stage)}; raise micro_batch_tokens to that or more"
            )
    evaluated = config.longest_response
    if evaluated > max(stage.max_response_tokens for stage in config.stages) and prompt + evaluated > shape.positions:
        yield (
            f"evaluate.max_response_tokens {evaluated} + data.max_prompt_tokens {prompt} = {prompt + evaluated} "
            f"exceeds the {shape.positions} tokens that the model allows; lower it, here or in a set or stage"
        )


def _engine_conflicts(config: Config, shape: Shape, device: Device) -> Iterator[str]:
    rollout = config.rollout
    tensor = rollout.tensor_parallel
    if rollout.router_replay and shape.experts is None:
        yield "rollout.router_replay = true, but the model has no experts to choose from; set it to false"
    yield from head_conflicts("rollout.tensor_parallel", tensor, shape)
    if device == "cpu":
        if rollout.kv_cache_bytes is None:
            yield "rollout.kv_cache_bytes is not set; on CPU vLLM needs it (67108864, 64 MiB, does for a tiny model)"
        if (latents := shape.latents) is not None and (latents.key, latents.rotated) != (512, 64):
            yield "vLLM computes latent attention on CPU only with kv_lora_rank = 512 and qk_rope_head_dim = 64"
        elif latents is None and shape.head_dim not in CPU_HEAD_DIMS:
            yield (
                f"the model's head_dim = {shape.head_dim} is not one that vLLM's CPU attention computes: "
                f"{', '.join(map(str, CPU_HEAD_DIMS))}; take another model"
            )
        if (net := shape.delta_net) is not None:
            has = config.model.dtype, net.key_head_dim, net.value_head_dim
            if has not in CPU_LINEAR_ATTENTION:
                yield (
                    "model.dtype, linear_key_head_dim and linear_value_head_dim are "
                    f"{', '.join(map(str, has))}; vLLM's linear attention on CPU computes "
                    f"{' or '.join(', '.join(map(str, known)) for known in CPU_LINEAR_ATTENTION)}"
                )
    elif rollout.placement == "colocated" and rollout.engines * tensor > config.parallel.ranks:
        yield (
            f"rollout.engines {rollout.engines} * rollout.tensor_parallel {tensor} = {rollout.engines * tensor} GPUs, "
            f"but colocated engines share the {config.parallel.ranks} of parallel.ranks; lower one, or "
            "set rollout.placement=separate"
        )
    longest = config.longest_sequence
    shape = replace(shape, windowed=range(0))  # vLLM wants room for all of one sequence, in windowed layers too
    held = kv_tokens(config, shape)
    if held is not None and held < longest and rollout.kv_cache_bytes is None:
        yield (
            f"a GPU of {config.cluster.gpu_memory_gb:g} GB has room for keys and values of {held:,} tokens, fewer than "
            f"one sequence of {longest:,}, beside the engine's weights and what trainer and engine keep; raise "
            "rollout.tensor_parallel, or set rollout.kv_cache_bytes yourself"
        )
    elif held is not None and held < longest:
        needed = longest * shape.kv_bytes_per_token(config.model.dtype) // max(1, min(tensor, shape.kv_heads))
        needed += engine_state_bytes(config, shape)
        yield (
            f"rollout.kv_cache_bytes = {rollout.kv_cache_bytes} holds {held} tokens, fewer than one sequence of "
            f"{longest}; set it to {needed} or, for speed, to a multiple of that"
        )


def _batch_conflicts(config: Config, problems: Sequence[int] | None, device: Device) -> Iterator[str]:
    data = config.parallel.data
    for stage in config.stages:
        samples = stage.prompts_per_update * stage.group_size
        if samples < data:
            yield (
                f"stage '{stage.name}': prompts_per_update {stage.prompts_per_update} * group_size {stage.group_size} "
                f"= {samples} samples cannot feed {data} data-parallel ranks; raise prompts_per_update or lower "
                "parallel.ranks"
            )
    yield from _stage_conflicts(config)
    if problems is not None:
        yield from _problem_conflicts(config, problems)
    if config.rollout.max_staleness and config.rollout.placement == "colocated" and device == "cuda":
        yield (
            f"rollout.max_staleness = {config.rollout.max_staleness} samples further steps while this one trains, but "
            "engines that are colocated sleep then; set rollout.placement=separate, or max_staleness to 0"
        )


def _stage_conflicts(config: Config) -> Iterator[str]:
    """Yield a line for each conflict between a stage's keys and the sections ``evaluate`` and ``algorithm``."""
    for stage in config.stages:
        if stage.refill_prompts and not config.algorithm.advantage.reject_uniform_groups:
            yield (
                f"stage '{stage.name}': refill_prompts = {stage.refill_prompts} makes up for rejected groups, and "
                "none is with algorithm.advantage.reject_uniform_groups=false; set that to true, or refill_prompts to 0"
            )
        every, where = config.evaluate.in_stage(stage).every_steps, "evaluate"
        if stage.evaluate.every_steps is not None:
            where = f"stage '{stage.name}': evaluate"
        if every and not config.evaluate.data:
            yield (
                f"{where}.every_steps = {every}, but evaluate.data is empty; name a problem file there, or set "
                "every_steps to 0"
            )
            return
        plateau = stage.plateau
        if plateau is None:
            continue
        titles = [held_out.title for held_out in config.evaluate.data]
        if not is_metric(plateau.metric, titles):
            yield (
                f"stage '{stage.name}': plateau.metric = '{plateau.metric}' is no metric of this run; docs/schemas.md "
                "lists them" + (f", and its held-out sets are {titles}" if titles else "")
            )
        elif plateau.metric.startswith("evaluation/") and not every:
            yield (
                f"stage '{stage.name}': plateau.metric = '{plateau.metric}' needs evaluations within the stage, and "
                "evaluate.every_steps is 0; set it, here or in the stage"
            )
        elif 2 * plateau.window * (every if plateau.metric.startswith("evaluation/") else 1) > stage.steps:
            yield (
                f"stage '{stage.name}': plateau.window = {plateau.window} values take more than half of the stage's "
                f"{stage.steps} steps: no second block would be full, and the plateau could never end it; lower window "
                "or raise steps"
            )


def _problem_conflicts(config: Config, problems: Sequence[int]) -> Iterator[str]:
    """Yield a line for each stage that samples more prompts in a step than its sources have in all."""
    for stage in config.stages:
        there = within_reach(config, stage, problems)
        if stage.prompts_per_step > there:
            yield (
                f"stage '{stage.name}': prompts_per_step = {stage.prompts_per_step}, but data.train has {there} "
                + ("problems in the sources of the stage's mixture" if stage.mixture else "problems")
                + ", and those of a step all differ; lower prompts_per_step or add problems"
            )


def within_reach(config: Config, stage: StageConfig, problems: Sequence[int]) -> int:
    """Return the number of distinct problems in the sources that a stage's mixture uses."""
    return sum(count for count, repeat in zip(problems, config.repeats(stage), strict=True) if repeat)


def _algorithm_conflicts(config: Config) -> Iterator[str]:
    """Yield a line for each key that the objective does not use, for an overlong penalty that every response gets, and
    for a dual clip that never acts: if N_SGD is 1, each ratio is 1, unless older weights sample without correction."""
    algorithm = config.algorithm
    yield from dict.fromkeys(line for stage in config.stages for line in objective_conflicts(algorithm, stage))
    soft = algorithm.advantage.overlong_tokens
    for stage in config.stages:
        if soft is not None and soft >= stage.max_response_tokens:
            yield (
                f"stage '{stage.name}': algorithm.advantage.overlong_tokens = {soft} is not less than "
                f"max_response_tokens = {stage.max_response_tokens}: every response would be penalised; lower it"
            )
    if config.rollout.max_staleness and algorithm.correction.mode == "off":
        return
    dual_clip = algorithm.loss.dual_clip
    if dual_clip is not None and all(stage.sgd_steps == 1 for stage in config.stages):
        yield (
            f"algorithm.loss.dual_clip = {dual_clip} works on tokens whose ratio has moved, but every stage has N_SGD "
            "= D_R / D_T * reuse = 1, where the ratio is 1 and none has; raise reuse, lower prompts_per_update, or "
            "take it out"
        )


def _divisors(value: int) -> str:
    return ", ".join(str(n) for n in range(1, value + 1) if value % n == 0 and n <= 64)
