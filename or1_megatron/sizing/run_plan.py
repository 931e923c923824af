"""What a configuration comes to, before anything starts: batches, ranks, tokens, evaluations, memory.

Pure arithmetic on a Config and an HF config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from or1_megatron.config.schema import Config, EvaluationConfig, StageConfig
from or1_megatron.sizing.conflicts import Device, conflicts, kv_tokens, padded_sequence
from or1_megatron.sizing.memory import NotEnoughMemory, ProcessMemory, check_memory, process_memory
from or1_megatron.sizing.stage_rules import problem_warnings, problems_per_epoch
from or1_megatron.weights.shape import Shape
from or1_verify.errors import UserError


class PlanError(UserError, ValueError):
    """A configuration that cannot work: one line per conflict, with its numbers and a way out."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of every set. ``tokens`` is a bound: every response as long as its set allows."""

    samples: tuple[int, ...]
    """Responses per problem, of each set."""
    responses: int | None
    """None where the problems were not counted."""
    tokens: int | None


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage in numbers. ``max_`` are bounds: every response as long as T allows, none rejected."""

    config: StageConfig
    responses_per_step: int
    samples_per_update: int
    samples_per_rank: int
    """Per update and data-parallel rank, rounded up."""
    max_tokens_per_step: int
    max_micro_batches: int
    """Per update and data-parallel rank."""
    waves: float
    """Responses per step over what all engines decode at once."""
    prompts_total: int
    per_epoch: int | None
    """Problems of an epoch, with repeats and weights; None when they were not counted."""
    every_steps: int
    """Steps between two evaluations; 0: none."""
    evaluation: Evaluation
    """One evaluation within the stage."""
    evaluations: int
    """How many there are in it, at most; those before and after training aside."""

    @property
    def epochs(self) -> float | None:
        return self.prompts_total / self.per_epoch if self.per_epoch else None


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run in numbers."""

    config: Config
    shape: Shape
    device: Device
    stages: tuple[StagePlan, ...]
    longest_sequence: int
    """Longest prompt + longest T, padded to the row multiple."""
    devices: int
    """Accelerators (on CPU: processes) that trainer and engines need together."""
    kv_tokens: int | None
    """Tokens that one engine's cache holds; None when vLLM sizes it."""
    memory: tuple[ProcessMemory, ...]
    """What the processes hold, an estimate."""
    problems: tuple[int, ...] | None
    """Problems of each source, each once; None when they were not counted."""
    held_out: tuple[int, ...] | None
    """Problems of each evaluation set; None when they were not counted."""
    evaluation: Evaluation
    """The evaluation before training, and after it."""
    warnings: tuple[str, ...]

    @property
    def rollout_steps(self) -> int:
        return sum(stage.config.steps for stage in self.stages)

    @property
    def optimizer_steps(self) -> int:
        return sum(stage.config.steps * stage.config.sgd_steps for stage in self.stages)

    @property
    def responses_total(self) -> int:
        return sum(stage.config.steps * stage.responses_per_step for stage in self.stages)


def plan(
    config: Config,
    hf: Mapping[str, Any],
    problems: Sequence[int] | None = None,
    device: Device = "cpu",
    held_out: Sequence[int] | None = None,
) -> Plan:
    """Work out ``config`` for a model with HF config ``hf``.

    Args:
        problems: how many each source of data.train has; None: unknown.
        held_out: the same of evaluate.data.

    Raises:
        PlanError: it cannot work; a line per conflict.
    """
    shape = Shape.of(hf)
    if found := list(conflicts(config, shape, problems, device)):
        raise PlanError("this configuration cannot work:\n" + "\n".join(f"  - {line}" for line in found))
    stages = tuple(_stage(config, index, problems, held_out) for index in range(len(config.stages)))
    engine_devices = config.rollout.engines * config.rollout.tensor_parallel
    together = max if config.rollout.placement == "colocated" else sum
    return Plan(
        config=config,
        shape=shape,
        device=device,
        stages=stages,
        longest_sequence=max(padded_sequence(config, stage) for stage in config.stages),
        devices=together((config.parallel.ranks, engine_devices)),
        kv_tokens=kv_tokens(config, shape),
        memory=process_memory(config, shape, device),
        problems=None if problems is None else tuple(problems),
        held_out=None if held_out is None else tuple(held_out),
        evaluation=_evaluation(config, config.evaluate, held_out, whole=True),
        warnings=(
            *_warnings(config, stages),
            *(() if problems is None else problem_warnings(config, problems)),
            *_memory_warnings(config, shape, device),
        ),
    )


def _stage(config: Config, index: int, problems: Sequence[int] | None, held_out: Sequence[int] | None) -> StagePlan:
    stage = config.stages[index]
    responses = stage.prompts_per_step * stage.group_size
    samples = stage.prompts_per_update * stage.group_size
    per_rank = _ceil(samples, config.parallel.data)
    # A row is closed only when the next sequence does not fit, so it holds at least this many.
    per_row = config.parallel.micro_batch_tokens // padded_sequence(config, stage)
    rows_multiple = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    settings = config.evaluate.in_stage(stage)
    return StagePlan(
        config=stage,
        responses_per_step=responses,
        samples_per_update=samples,
        samples_per_rank=per_rank,
        max_tokens_per_step=responses * (config.data.max_prompt_tokens + stage.max_response_tokens),
        max_micro_batches=_ceil(_ceil(per_rank, per_row), rows_multiple) * rows_multiple,
        waves=responses / (config.rollout.engines * config.rollout.max_concurrent),
        prompts_total=stage.steps * stage.prompts_per_step,
        per_epoch=None if problems is None else round(problems_per_epoch(config, stage, problems)),
        every_steps=settings.every_steps,
        evaluation=_evaluation(config, settings, held_out, whole=False),
        evaluations=_evaluations_within(config, index, settings.every_steps),
    )


def _evaluation(config: Config, settings: EvaluationConfig, held_out: Sequence[int] | None, whole: bool) -> Evaluation:
    samples = tuple(settings.samples_of(each, whole) for each in settings.data)
    if held_out is None:
        return Evaluation(samples, None, None)
    longest = [settings.longest_of(each, config.stages[-1].max_response_tokens) for each in settings.data]
    responses = [count * k for count, k in zip(held_out, samples, strict=True)]
    return Evaluation(samples, sum(responses), sum(count * t for count, t in zip(responses, longest, strict=True)))


def _evaluations_within(config: Config, index: int, every: int) -> int:
    """Count the multiples of ``every`` among the stage's steps; the run's last step is not one: training ends there."""
    before = sum(stage.steps for stage in config.stages[:index])
    last = before + config.stages[index].steps - (index == len(config.stages) - 1)
    return last // every - before // every if every else 0


def _warnings(config: Config, stages: tuple[StagePlan, ...]) -> Iterator[str]:
    if not config.evaluate.data:
        yield "evaluate.data is empty: no accuracy before and after, and no best checkpoint"
    elif config.evaluate.temperature == 0 and config.evaluate.samples > 1:
        yield f"evaluate.temperature is 0: its {config.evaluate.samples} samples per problem will be the same"
    longest, budget = (
        max(padded_sequence(config, stage) for stage in config.stages),
        config.parallel.micro_batch_tokens,
    )
    if 2 * budget < 3 * longest and any(stage.max_micro_batches > 1 for stage in stages):
        yield (
            f"parallel.micro_batch_tokens = {budget} is close to the longest sequence, {longest}: rows of one length "
            "then pad by several percent; with 1.5 times it or more they pad by less than 1%"
        )
    yield from _sampling_warnings(config)
    for stage in stages:
        name, sgd_steps = stage.config.name, stage.config.sgd_steps
        if sgd_steps >= 4 and config.algorithm.entropy.mode == "adaptive":
            yield (
                f"stage '{name}': N_SGD = {sgd_steps} with adaptive entropy control: entropy was seen to "
                "become unstable from 4 on; 1 or 2 is stable"
            )
        if stage.max_micro_batches < config.parallel.pipeline:
            yield (
                f"stage '{name}': at most {stage.max_micro_batches} micro-batches for {config.parallel.pipeline} "
                "pipeline stages: some stages idle; lower micro_batch_tokens"
            )


def _sampling_warnings(config: Config) -> Iterator[str]:
    loss = config.algorithm.loss
    if config.algorithm.objective.name == "gspo" and max(loss.clip_low, loss.clip_high) >= 0.1:
        yield (
            f"algorithm.loss.clip_low = {loss.clip_low:g} and clip_high = {loss.clip_high:g} with gspo: a response's "
            "ratio is a geometric mean, which hardly moves, so they clip nothing; the paper has 3e-4 and 4e-4"
        )
    if config.algorithm.objective.name == "cispo" and loss.clip_low < 1:
        yield (
            f"algorithm.loss.clip_low = {loss.clip_low:g} with cispo: its paper has no lower bound of the ratio; 1 "
            "switches it off"
        )
    if config.rollout.old_kv_cache == "keep" and not config.rollout.max_staleness:
        yield "rollout.old_kv_cache = keep has no effect without rollout.max_staleness: handoffs find nothing in flight"
    for stage in config.stages:
        why = "refill_prompts" if stage.refill_prompts else "plateau" if stage.plateau is not None else None
        if why is not None and config.rollout.max_staleness > 1:
            yield (
                f"stage '{stage.name}': rollout.max_staleness = {config.rollout.max_staleness} works as 1, because "
                f"with {why} only the next step is known ahead"
            )
    stale = config.rollout.max_staleness and config.algorithm.correction.mode == "off"
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


def _memory_warnings(config: Config, shape: Shape, device: Device) -> Iterator[str]:
    """Yield why a GPU of ``cluster.gpu_memory_gb`` is too small."""
    if config.cluster.gpu_memory_gb is None or device == "cpu":
        return
    try:
        check_memory(config, shape, device, int(config.cluster.gpu_memory_gb * 1e9))
    except NotEnoughMemory as error:
        yield str(error)


def _ceil(value: int, by: int) -> int:
    return -(-value // by)
