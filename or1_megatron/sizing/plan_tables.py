"""A plan as tables, for any rich console."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from or1_megatron.config.hardware import known, read_hardware
from or1_megatron.config.schema import Config, EntropyConfig
from or1_megatron.kernels.estimate import Gpu, estimate
from or1_megatron.kernels.plan import allocation_plan
from or1_megatron.sizing.memory import gib, needed
from or1_megatron.sizing.run_plan import Evaluation, Plan
from or1_megatron.sizing.storage import in_memory_bytes

Row = tuple[str, str]
_NODE_GPUS = 8
"""GPUs of a node: a plan is made for such nodes, whatever machine this is."""


def render(found: Plan) -> RenderableType:
    """Return the plan's tables, its warnings last."""
    stages = Table(title="Stages", title_justify="left", box=None, padding=(0, 2))
    stages.add_column("")
    for stage in found.config.stages:
        stages.add_column(stage.name, justify="right")
    for name, values in _stage_rows(found):
        stages.add_row(name, *values)
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in found.warnings]
    return Group(
        _pairs("Layout", _layout_rows(found)),
        _pairs("Algorithm", _algorithm_rows(found.config)),
        _pairs("Data", _data_rows(found)),
        Padding(stages, (0, 0, 1, 0)),
        _pairs("Memory of a GPU, estimated" if found.device == "cuda" else "Memory, estimated", _memory_rows(found)),
        *warnings,
    )


def _pairs(title: str, rows: Iterable[Row]) -> Padding:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    return Padding(table, (0, 0, 1, 0))


def _layout_rows(found: Plan) -> Iterator[Row]:
    shape, parallel, rollout = found.shape, found.config.parallel, found.config.rollout
    devices = f"{found.devices} {'GPUs' if found.device == 'cuda' else 'processes at work at once'}"
    kv = "sized by vLLM" if found.kv_tokens is None else f"{found.kv_tokens:,} tokens per engine"
    extras = ", sequence parallel" if parallel.sequence else ""
    extras += f", experts over {parallel.expert} ranks" if parallel.expert > 1 else ""
    extras += f", {parallel.virtual_pipeline} chunks per stage" if parallel.virtual_pipeline > 1 else ""
    extras += f", {parallel.recompute} recompute" if parallel.recompute != "none" else ""
    yield "model", f"{shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers, hidden {shape.hidden}"
    yield (
        "trainer",
        f"{parallel.ranks} ranks = TP {parallel.tensor} x PP {parallel.pipeline} x CP {parallel.context} x DP "
        f"{parallel.data}{extras}",
    )
    yield "micro-batch", f"{parallel.micro_batch_tokens:,} tokens; the longest sequence is {found.longest_sequence:,}"
    if found.device == "cuda" and found.config.model.dtype == "bfloat16":
        yield from _head_rows(found)
    yield "engines", f"{rollout.engines} x TP {rollout.tensor_parallel}, {rollout.placement}; {devices}"
    yield "decoding at once", f"{rollout.engines * rollout.max_concurrent:,} responses; KV cache {kv}"
    yield (
        "in all",
        f"{found.rollout_steps:,} rollout steps, {found.responses_total:,} responses, "
        f"{found.optimizer_steps:,} SGD steps",
    )


def _head_rows(found: Plan) -> Iterator[Row]:
    parallel, hidden = found.config.parallel, found.shape.hidden
    tokens, rows = parallel.micro_batch_tokens // parallel.context, -(-found.shape.vocab // parallel.tensor)
    sizes = allocation_plan(tokens, hidden, rows, torch.bfloat16, parallel.head)
    tile = sizes.tile_tokens, sizes.block_rows
    gpus = {name.upper(): Gpu.of(hardware) for name in known() if (hardware := read_hardware(name)).match}
    took = {name: estimate(tokens, hidden, rows, *tile, parallel.head, gpu) for name, gpu in gpus.items()}
    times = _by_gpu({name: f"{each.seconds * 1e3:.3g} ms ({each.share_of_floor:.0%})" for name, each in took.items()})
    waves = _by_gpu({name: f"{each.share_of_waves:.0%}" for name, each in took.items()})
    moved = max(each.moved_bytes for each in took.values())  # the same on all
    yield f"head, {parallel.head}", f"{times} per micro-batch (share of full rate), expected"
    yield (
        "",
        f"waves of its products full by {waves}; {moved / 1e9:.3g} GB of logits and sums; "
        f"tiles of {sizes.tile_tokens:,} x {sizes.block_rows:,}",
    )


def _by_gpu(values: Mapping[str, str]) -> str:
    """Return each value with the GPUs that have it."""
    gpus: dict[str, list[str]] = {}
    for name, value in values.items():
        gpus.setdefault(value, []).append(name)
    return ", ".join(f"{value} on {' and '.join(names)}" for value, names in gpus.items())


def _algorithm_rows(config: Config) -> Iterator[Row]:
    optimizer, algorithm = config.optimizer, config.algorithm
    loss, kl, correction = algorithm.loss, algorithm.kl, algorithm.correction
    rate = f"lr {optimizer.lr:g}"
    rate += f", rising over {optimizer.warmup_steps:,} SGD steps" if optimizer.warmup_steps else ""
    rate += f", falling to 0 at SGD step {optimizer.decay_steps:,}" if optimizer.decay_steps else ""
    adam = f"AdamW {optimizer.beta1:g}, {optimizer.beta2:g}, weight decay {optimizer.weight_decay:g}"
    yield "optimizer", f"{rate}; {adam}; gradient norm at most {optimizer.clip_grad:g}"
    clips = f"clip {loss.clip_low:g} low, {loss.clip_high:g} high"
    clips += "" if loss.dual_clip is None else f", dual {loss.dual_clip:g}"
    chosen = algorithm.objective
    own = "".join(f", {key} {value}" for key, value in chosen.args.items())
    named = "" if chosen.name == "clipped" else f"{chosen.name}{own}; "
    divisor = "" if loss.divisor == "own" else f", {loss.divisor} divisor"
    yield "loss", f"{named}{clips}; {loss.aggregation}{divisor}"
    advantage = algorithm.advantage
    overlong = ""
    if advantage.overlong_tokens is not None:
        overlong = f"; penalty of {advantage.overlong_penalty:g} over the last {advantage.overlong_tokens:,} tokens"
    divided = "by the group's std" if advantage.scale == "std" else "not divided"
    yield "advantages", f"{divided}; truncation mask {advantage.truncation_mask}{overlong}"
    rejected = "rejected" if algorithm.advantage.reject_uniform_groups else "kept"
    shape = kl.estimator + ("" if kl.cap is None else f" capped at {kl.cap:g}")
    divergence = "off" if kl.reference is None else f"{kl.coefficient:g} ({shape})"
    least = "" if correction.floor is None else f"{correction.floor:g} and "
    weights = f"{correction.mode} at {least}{correction.cap:g} by {correction.level}"
    weights = "off" if correction.mode == "off" else weights
    yield "", f"groups without advantage {rejected}; KL {divergence}; importance correction {weights}"
    yield from _entropy_rows(algorithm.entropy)


def _entropy_rows(entropy: EntropyConfig) -> Iterator[Row]:
    if entropy.mode in ("off", "fixed"):
        yield "entropy bonus", "off" if entropy.mode == "off" else f"fixed at {entropy.coefficient:g}"
        return
    bounds = f"bounds {entropy.minimum:g}, {'none' if entropy.maximum is None else f'{entropy.maximum:g}'}"
    moves = f"delta {entropy.delta:g}, c from {entropy.coefficient:g}"
    yield "entropy bonus", f"{entropy.mode}, target {entropy.target:g} nats per token, {moves}, {bounds}"
    estimate = f"e_k {entropy.estimate}, of {entropy.measured_on} responses"
    yield "", f"{estimate}; gate {entropy.gate}"


def _data_rows(found: Plan) -> Iterator[Row]:
    config = found.config
    counts = ["" if found.problems is None else f"{count:,} " for count in found.problems or config.data.train]
    mixtures = []
    for plan in found.stages:
        sources = zip(counts, config.data.train, config.repeats(plan.config), strict=True)
        mixed = " + ".join(f"{count}{source.title} x {repeat * source.weight:g}" for count, source, repeat in sources)
        mixtures.append(mixed + ("" if plan.per_epoch is None else f" = {plan.per_epoch:,} problems per epoch"))
    yield from _by_stage("mixture", mixtures, found)
    if config.data.difficulty_model and found.problems is not None:
        yield "", f"before the filter of data.difficulty_model, {config.data.difficulty_model}"
    if not config.evaluate.data:
        return
    yield "evaluation sets", ", ".join(held_out.title for held_out in config.evaluate.data)
    yield "before and after training", _cost(found.evaluation)
    during = [
        f"every {plan.every_steps:,} steps: {_cost(plan.evaluation)}" if plan.evaluations else "none"
        for plan in found.stages
    ]
    yield from _by_stage("during training", during, found)
    if found.evaluation.responses is not None:
        spent = 2 * found.evaluation.responses + sum(
            plan.evaluations * (plan.evaluation.responses or 0) for plan in found.stages
        )
        yield "in all", f"{spent:,} responses, {spent / found.responses_total:.1%} of what training samples"


def _by_stage(name: str, values: Sequence[str], found: Plan) -> Iterator[Row]:
    """Yield one row where all stages agree, else one for each."""
    if len(set(values)) == 1:
        yield name, values[0]
        return
    for stage, value in zip(found.config.stages, values, strict=True):
        yield f"{name}, stage {stage.name}", value


def _cost(evaluation: Evaluation) -> str:
    samples = " + ".join(map(str, evaluation.samples))
    if evaluation.responses is None or evaluation.tokens is None:
        return f"{samples} responses per problem"
    return f"{evaluation.responses:,} responses ({samples} per problem), at most {evaluation.tokens:,} tokens"


def _stage_rows(found: Plan) -> list[tuple[str, list[str]]]:
    """(name, a value for each stage); rows of switches that no stage uses are left out."""
    plans, stages = found.stages, found.config.stages
    rows = [
        ("rollout steps", [f"{s.steps:,}" for s in stages]),
        ("  or to a plateau of", [s.plateau.metric if s.plateau else "-" for s in stages]),
        ("T, response tokens", [f"{s.max_response_tokens:,}" for s in stages]),
        ("temperature", [f"{s.temperature:g}" for s in stages]),
        ("top_p", [f"{s.top_p:g}" for s in stages]),
        ("D_R, prompts per step", [f"{s.prompts_per_step:,}" for s in stages]),
        ("D_T, prompts per SGD step", [f"{s.prompts_per_update:,}" for s in stages]),
        ("group size", [f"{s.group_size:,}" for s in stages]),
        ("refill, prompts at most", [f"{s.refill_prompts:,}" if s.refill_prompts else "-" for s in stages]),
        ("responses per step", [f"{p.responses_per_step:,}" for p in plans]),
        ("N_SGD, SGD steps per step", [f"{s.sgd_steps:,}" for s in stages]),
        ("samples per SGD step", [f"{p.samples_per_update:,}" for p in plans]),
        ("  per data-parallel rank", [f"{p.samples_per_rank:,}" for p in plans]),
        ("micro-batches per rank, at most", [f"{p.max_micro_batches:,}" for p in plans]),
        ("tokens per step, at most", [f"{p.max_tokens_per_step:,}" for p in plans]),
        ("engine waves per step", [f"{p.waves:.2f}" for p in plans]),
        ("prompts drawn", [f"{p.prompts_total:,}" for p in plans]),
        ("  in epochs", ["?" if p.epochs is None else f"{p.epochs:.2f}" for p in plans]),
        ("evaluations", [f"{p.evaluations:,}" if p.evaluations else "-" for p in plans]),
    ]
    return [(name, values) for name, values in rows if set(values) != {"-"}]


def _memory_rows(found: Plan) -> Iterator[Row]:
    for each in found.memory:
        yield each.process, str(each)
    if found.device == "cpu":
        yield "at one time", gib(needed(found.config, found.memory, found.device))
    here = found.config.parallel.ranks if found.device == "cpu" else _NODE_GPUS
    if in_memory := in_memory_bytes(found.config, found.shape, here):
        yield "checkpoints in memory", f"{gib(in_memory)} of a node's host memory, if that much is free"
