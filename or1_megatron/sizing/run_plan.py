"""What a configuration comes to, before anything starts: batches, ranks, tokens, memory; and why it cannot work.

Pure arithmetic on a Config and an HF config.json. Every conflict is found, not only the first, and each is reported
with the numbers that conflict and a way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from or1_megatron.config.schema import Config, ParallelConfig, StageConfig
from or1_megatron.errors import UserError
from or1_megatron.sizing.memory import RESERVE_BYTES, activation_bytes, state_bytes
from or1_megatron.sizing.stage_rules import problem_conflicts, problem_warnings, problems_per_epoch, stage_conflicts
from or1_megatron.weights.shape import Shape
from or1_megatron.weights.table import Experts

Device = Literal["cpu", "cuda"]

CPU_HEAD_DIMS: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of vLLM 0.32's CPU attention (its ``get_supported_head_sizes``)."""


class PlanError(UserError, ValueError):
    """A configuration that cannot work: one line per conflict, with its numbers and a way out."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage in numbers. ``max_`` are bounds: every response as long as T allows, none rejected."""

    name: str
    steps: int
    max_response_tokens: int  # T
    prompts_per_step: int  # D_R
    prompts_per_update: int  # D_T
    group_size: int  # M
    responses_per_step: int
    sgd_steps: int  # N_SGD per rollout step
    samples_per_update: int
    samples_per_rank: int  # per update and data-parallel rank, rounded up
    max_tokens_per_step: int
    max_micro_batches: int  # per update and data-parallel rank
    waves: float  # responses per step over what all engines decode at once
    prompts_total: int
    epochs: float | None  # prompts_total over those of an epoch of this stage; None when those were not counted
    refill_prompts: int = 0  # beyond prompts_per_step, at most; not in the numbers above
    plateau: str = ""  # the metric whose plateau may end the stage sooner


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run in numbers."""

    stages: tuple[StagePlan, ...]
    shape: Shape
    device: Device
    ranks: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    sequence: bool
    virtual_pipeline: int
    recompute: str
    micro_batch_tokens: int
    longest_sequence: int  # longest prompt + longest T, padded to the row multiple
    engines: int
    engine_tensor: int
    placement: str
    devices: int  # accelerators (on CPU: processes) that trainer and engines need together
    concurrent: int  # responses decoded at once by all engines
    kv_tokens: int | None  # tokens that one engine's cache holds; None when vLLM sizes it
    state_bytes_per_rank: int  # weights, gradients and optimizer state of one trainer rank
    activation_bytes_per_rank: int  # an estimate, at rows of micro_batch_tokens
    problems: int | None  # of all sources, each once; None when they were not counted
    problems_per_epoch: int | None  # of the first stage, with repeats and weights
    difficulty_model: str | None  # its filter comes later, and is not in the counts
    rollout_steps: int
    optimizer_steps: int
    responses_total: int
    warnings: tuple[str, ...]


def plan(config: Config, hf: Mapping[str, Any], problems: Sequence[int] | None = None, device: Device = "cpu") -> Plan:
    """Work out ``config`` for a model with HF config ``hf``; ``problems`` of each source of data.train (None: unknown).

    Raises:
        PlanError: it cannot work; a line per conflict.
    """
    shape = Shape.of(hf)
    conflicts = [
        *layout_conflicts(config.parallel, shape),
        *_length_conflicts(config, shape),
        *_engine_conflicts(config, shape, device),
        *_batch_conflicts(config, problems, device),
        *_algorithm_conflicts(config),
    ]
    if conflicts:
        raise PlanError("this configuration cannot work:\n" + "\n".join(f"  - {line}" for line in conflicts))
    parallel, rollout = config.parallel, config.rollout
    stages = tuple(_stage(config, stage, problems) for stage in config.stages)
    engine_devices = rollout.engines * rollout.tensor_parallel
    together = max if rollout.placement == "colocated" else sum
    return Plan(
        stages=stages,
        shape=shape,
        device=device,
        ranks=parallel.ranks,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
        data=parallel.data,
        sequence=parallel.sequence,
        virtual_pipeline=parallel.virtual_pipeline,
        recompute=parallel.recompute,
        micro_batch_tokens=parallel.micro_batch_tokens,
        longest_sequence=max(_longest(config, stage) for stage in config.stages),
        engines=rollout.engines,
        engine_tensor=rollout.tensor_parallel,
        placement=rollout.placement,
        devices=together((parallel.ranks, engine_devices)),
        concurrent=rollout.engines * rollout.max_concurrent,
        kv_tokens=_kv_tokens(config, shape),
        state_bytes_per_rank=state_bytes(config, shape),
        activation_bytes_per_rank=activation_bytes(config, shape),
        problems=None if problems is None else sum(problems),
        problems_per_epoch=None if problems is None else round(problems_per_epoch(config, config.stages[0], problems)),
        difficulty_model=config.data.difficulty_model,
        rollout_steps=sum(stage.steps for stage in stages),
        optimizer_steps=sum(stage.steps * stage.sgd_steps for stage in stages),
        responses_total=sum(stage.steps * stage.responses_per_step for stage in stages),
        warnings=(
            *_warnings(config, stages),
            *(() if problems is None else problem_warnings(config, problems)),
            *_memory_warnings(config, shape),
        ),
    )


def _stage(config: Config, stage: StageConfig, problems: Sequence[int] | None) -> StagePlan:
    responses = stage.prompts_per_step * stage.group_size
    samples = stage.prompts_per_update * stage.group_size
    per_rank = _ceil(samples, config.parallel.data)
    longest = _longest(config, stage)
    # A row is closed only when the next sequence does not fit, so it holds at least this many.
    per_row = config.parallel.micro_batch_tokens // longest
    rows_multiple = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    per_epoch = 0.0 if problems is None else problems_per_epoch(config, stage, problems)
    return StagePlan(
        name=stage.name,
        steps=stage.steps,
        max_response_tokens=stage.max_response_tokens,
        prompts_per_step=stage.prompts_per_step,
        prompts_per_update=stage.prompts_per_update,
        group_size=stage.group_size,
        responses_per_step=responses,
        sgd_steps=stage.sgd_steps,
        samples_per_update=samples,
        samples_per_rank=per_rank,
        max_tokens_per_step=responses * (config.data.max_prompt_tokens + stage.max_response_tokens),
        max_micro_batches=_ceil(_ceil(per_rank, per_row), rows_multiple) * rows_multiple,
        waves=responses / (config.rollout.engines * config.rollout.max_concurrent),
        prompts_total=stage.steps * stage.prompts_per_step,
        epochs=stage.steps * stage.prompts_per_step / per_epoch if per_epoch else None,
        refill_prompts=stage.refill_prompts,
        plateau="" if stage.plateau is None else stage.plateau.metric,
    )


def _longest(config: Config, stage: StageConfig) -> int:
    """Longest prompt + T, rounded up to the 2 * CP * TP tokens that a packed row is a multiple of."""
    multiple = 2 * config.parallel.context * config.parallel.tensor
    return _ceil(config.data.max_prompt_tokens + stage.max_response_tokens, multiple) * multiple


def layout_conflicts(parallel: ParallelConfig, shape: Shape) -> Iterator[str]:
    """Why a model of this shape cannot be cut so; nothing when it can."""
    tensor = parallel.tensor
    experts = shape.experts
    divided = [("num_attention_heads", shape.heads)]
    if experts is None or len(experts.layers) < shape.layers:
        divided.append(("intermediate_size", shape.intermediate))
    if experts is not None:
        divided.append(("moe_intermediate_size", experts.intermediate))
    for name, count in divided:
        if count % tensor:
            yield (
                f"parallel.tensor = {tensor} does not divide the model's {name} = {count}; "
                f"tensor sizes that do: {_divisors(count)}"
            )
    # Of fewer key/value heads than TP ranks Megatron cuts the weight all the same, within heads, and gathers the
    # activations before attention, so that the ranks which share a head compute with the same one.
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield (
            f"parallel.tensor = {tensor} neither divides the model's num_key_value_heads = {shape.kv_heads} nor is a "
            f"multiple of it; choose a divisor ({_divisors(shape.kv_heads)}) or a multiple"
        )
    yield from _expert_conflicts(parallel, experts)
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
                f"{stage.max_response_tokens} = {total} exceeds the model's max_position_embeddings = "
                f"{shape.positions}; lower one of the two by {total - shape.positions}"
            )
        if _longest(config, stage) > budget:
            yield (
                f"stage '{stage.name}': parallel.micro_batch_tokens = {budget} is less than one sequence can need: "
                f"data.max_prompt_tokens {prompt} + max_response_tokens {stage.max_response_tokens}, padded = "
                f"{_longest(config, stage)}; raise micro_batch_tokens to that or more"
            )
    evaluated = config.longest_response
    if evaluated > max(stage.max_response_tokens for stage in config.stages) and prompt + evaluated > shape.positions:
        yield (
            f"evaluate.max_response_tokens {evaluated} + data.max_prompt_tokens {prompt} = {prompt + evaluated} "
            f"exceeds the model's max_position_embeddings = {shape.positions}; lower it, here or in a set or stage"
        )


def _engine_conflicts(config: Config, shape: Shape, device: Device) -> Iterator[str]:
    rollout = config.rollout
    tensor = rollout.tensor_parallel
    if shape.heads % tensor:
        yield (
            f"rollout.tensor_parallel = {tensor} does not divide the model's num_attention_heads = {shape.heads}; "
            f"sizes that do: {_divisors(shape.heads)}"
        )
    # vLLM cuts the key/value heads over the ranks, or copies each to the same number of ranks.
    elif shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield (
            f"rollout.tensor_parallel = {tensor} neither divides the model's num_key_value_heads = {shape.kv_heads} "
            f"nor is a multiple of it; choose a divisor ({_divisors(shape.kv_heads)}) or a multiple"
        )
    if device == "cpu":
        if rollout.kv_cache_bytes is None:
            yield "rollout.kv_cache_bytes is not set; on CPU vLLM needs it (67108864, 64 MiB, does for a tiny model)"
        if shape.head_dim not in CPU_HEAD_DIMS:
            yield (
                f"the model's head_dim = {shape.head_dim} is not one that vLLM's CPU attention computes: "
                f"{', '.join(map(str, CPU_HEAD_DIMS))}; take another model"
            )
    elif rollout.placement == "colocated" and rollout.engines * tensor > config.parallel.ranks:
        yield (
            f"rollout.engines {rollout.engines} * rollout.tensor_parallel {tensor} = {rollout.engines * tensor} GPUs, "
            f"but colocated engines share the {config.parallel.ranks} of parallel.ranks; lower one, or "
            "set rollout.placement=separate"
        )
    longest = config.data.max_prompt_tokens + config.longest_response
    kv_tokens = _kv_tokens(config, shape)
    if kv_tokens is not None and kv_tokens < longest:
        needed = longest * shape.kv_bytes_per_token(config.model.dtype) // max(1, min(tensor, shape.kv_heads))
        yield (
            f"rollout.kv_cache_bytes = {rollout.kv_cache_bytes} holds {kv_tokens} tokens, fewer than one sequence of "
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
    yield from stage_conflicts(config)
    if problems is not None:
        yield from problem_conflicts(config, problems)
    if config.rollout.max_staleness and config.rollout.placement == "colocated" and device == "cuda":
        yield (
            f"rollout.max_staleness = {config.rollout.max_staleness} samples the next step while this one trains, but "
            "engines that are colocated sleep then; set rollout.placement=separate, or max_staleness to 0"
        )


def _algorithm_conflicts(config: Config) -> Iterator[str]:
    """What needs tokens that the clip closes. At N_SGD = 1 rho is 1 and none is, unless it is against the log-probs of
    an older version (``rl.loss.old_is_the_policy``)."""
    algorithm = config.algorithm
    if config.rollout.max_staleness and algorithm.correction.mode == "off":
        return
    asked = {
        "entropy.bonus_on = clipped": algorithm.entropy.bonus_on == "clipped",
        f"loss.clip_high_control.delta = {algorithm.loss.clip_high_control.delta:g}": (
            algorithm.loss.clip_high_control.delta > 0
        ),
        f"loss.dual_clip = {algorithm.loss.dual_clip}": algorithm.loss.dual_clip is not None,
    }
    if all(stage.sgd_steps == 1 for stage in config.stages):
        for setting in (name for name, is_set in asked.items() if is_set):
            yield (
                f"algorithm.{setting} works on tokens that the clip closes, but every stage has N_SGD = D_R / D_T * "
                "reuse = 1, where the ratio is 1 and none is; raise reuse, lower prompts_per_update, or take it out"
            )


def _warnings(config: Config, stages: tuple[StagePlan, ...]) -> Iterator[str]:
    if not config.evaluate.data:
        yield "evaluate.data is empty: no accuracy before and after, and no best checkpoint"
    elif config.evaluate.temperature == 0 and config.evaluate.samples > 1:
        yield f"evaluate.temperature is 0: its {config.evaluate.samples} samples per problem will be the same"
    longest, budget = max(_longest(config, stage) for stage in config.stages), config.parallel.micro_batch_tokens
    if 2 * budget < 3 * longest and any(stage.max_micro_batches > 1 for stage in stages):
        yield (
            f"parallel.micro_batch_tokens = {budget} is close to the longest sequence, {longest}: rows of one length "
            "then pad by several percent; with 1.5 times it or more they pad by less than 1%"
        )
    if config.algorithm.loss.aggregation == "micro_batch_mean":
        yield (
            "algorithm.loss.aggregation is micro_batch_mean: the loss depends on how responses are cut into rows, so "
            "on parallel.micro_batch_tokens and the layout; two layouts do not train the same"
        )
    yield from _sampling_warnings(config)
    for stage in stages:
        if stage.sgd_steps >= 4 and config.algorithm.entropy.mode == "adaptive":
            yield (
                f"stage '{stage.name}': N_SGD = {stage.sgd_steps} with adaptive entropy control: entropy was seen to "
                "become unstable from 4 on; 1 or 2 is stable"
            )
        if stage.max_micro_batches < config.parallel.pipeline:
            yield (
                f"stage '{stage.name}': at most {stage.max_micro_batches} micro-batches for {config.parallel.pipeline} "
                "pipeline stages: some stages idle; lower micro_batch_tokens"
            )


def _sampling_warnings(config: Config) -> Iterator[str]:
    loss, stale = config.algorithm.loss, config.rollout.max_staleness and config.algorithm.correction.mode == "off"
    for stage in config.stages:
        if stage.sgd_steps == 1 and not stale and loss.clip_low != loss.clip_high:
            yield (
                f"stage '{stage.name}': N_SGD = 1, where the ratio is 1: clip_low = {loss.clip_low:g} and clip_high = "
                f"{loss.clip_high:g} have no effect"
            )
        if stage.top_p < 1:
            yield (
                f"stage '{stage.name}': top_p = {stage.top_p:g}: responses are drawn from the nucleus, but log-probs, "
                "ratios and entropies are of the whole distribution; the gradient is biased"
            )


def _memory_warnings(config: Config, shape: Shape) -> Iterator[str]:
    if config.cluster.gpu_memory_gb is None:
        return
    there = int(config.cluster.gpu_memory_gb * 1e9)
    state, activations = state_bytes(config, shape), activation_bytes(config, shape)
    if (wanted := state + activations + RESERVE_BYTES) > there:
        parts = " + ".join(f"{part / 1e9:.0f}" for part in (state, activations, RESERVE_BYTES))
        yield (
            f"a trainer rank needs about {wanted / 1e9:.0f} GB ({parts}: state, activations, reserve), and "
            f"cluster.gpu_memory_gb is {config.cluster.gpu_memory_gb:g}; raise parallel.tensor, pipeline or context, "
            "or recompute more"
        )


def _kv_tokens(config: Config, shape: Shape) -> int | None:
    if config.rollout.kv_cache_bytes is None:
        return None
    cut = min(config.rollout.tensor_parallel, shape.kv_heads)
    return config.rollout.kv_cache_bytes * cut // shape.kv_bytes_per_token(config.model.dtype)


def _ceil(value: int, by: int) -> int:
    return -(-value // by)


def _divisors(value: int) -> str:
    return ", ".join(str(n) for n in range(1, value + 1) if value % n == 0 and n <= 64)
