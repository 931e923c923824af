"""Finds the layouts of a number of GPUs that fit in memory, and ranks them by the hours of the run.

A colocated step is the sum of what trainer and engines take, so each side's candidates are timed on their own, at the
middle of the longest stage; the best of both are then combined, checked, and timed as a whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np

from or1_megatron.config.schema import Config
from or1_megatron.plan.clocks import engine_clock
from or1_megatron.plan.lengths import Lengths, Moment
from or1_megatron.plan.nearest import Change, changed, fits
from or1_megatron.plan.run_time import run_time
from or1_megatron.plan.step_time import Machine, kept_sequences, sample, workload_at
from or1_megatron.plan.update_time import update_time
from or1_megatron.sizing.conflicts import conflicts, padded_sequence
from or1_megatron.weights.shape import Shape

_SIZES: Final = (1, 2, 4, 8)
_CONTEXTS: Final = (1, 2, 4)
_RECOMPUTE: Final = ("none", "selective", "full")
_PLACES: Final = (64, 128, 256, 512)
"""max_concurrent."""
_TIMED: Final = 4
"""Combinations that are timed as a whole run, for each split of the GPUs."""
_SHARES: Final = (0.25, 0.5, 0.75)
"""Share of the GPUs that the trainer gets, where engines have their own."""


@dataclass(frozen=True, slots=True)
class RankedLayout:
    """A layout that fits."""

    change: Change
    hours: float
    binds: str
    trainer: str
    engines: str


def search(config: Config, machine: Machine, lengths: Lengths, gpus: int | None = None) -> list[RankedLayout]:
    """Return the best layouts on ``gpus`` devices (as many as ``config`` takes), fastest first; empty: none fits."""
    count = gpus or config.parallel.ranks
    found: list[RankedLayout] = []
    for ranks, engine_gpus in _splits(config, count):
        trainers = _trainers(config, machine, lengths, ranks, engine_gpus)
        engines = _engines(config, machine, lengths, ranks, engine_gpus)
        timed = 0
        for (_, trainer), (_, engine) in sorted(product(trainers, engines), key=lambda both: both[0][0] + both[1][0]):
            change = {"parallel.ranks": ranks, **trainer, **engine}
            made = _possible(config, machine, change) if timed < _TIMED else None
            if made is not None:
                timed += 1
                time = run_time(made, machine, lengths, points=1)
                found.append(RankedLayout(change, time.hours, time.binds, _trainer(made), _engine(made)))
    return sorted(found, key=lambda each: each.hours)


def _splits(config: Config, count: int) -> list[tuple[int, int]]:
    """Return (trainer ranks, engine GPUs): both all GPUs where they take turns."""
    if config.rollout.placement == "colocated":
        return [(count, count)]
    return [(int(count * share), count - int(count * share)) for share in _SHARES]


def _possible(config: Config, machine: Machine, change: Change) -> Config | None:
    """Return the changed configuration if it works and fits, else None."""
    made = changed(config, change)
    if made is None or next(conflicts(made, machine.shape, None, "cuda"), None) is not None:
        return None
    return made if fits(made, machine.shape, "cuda", int(machine.rates.memory_bytes)) else None


def _at(config: Config) -> Moment:
    """Return the middle of the longest stage, in tokens sampled."""
    index = max(
        range(len(config.stages)),
        key=lambda n: config.stages[n].steps * config.stages[n].max_response_tokens,
    )
    return Moment(config.stages, index, config.stages[index].steps / 2)


def _trainers(
    config: Config, machine: Machine, lengths: Lengths, ranks: int, engine_gpus: int
) -> list[tuple[float, dict[str, Any]]]:
    """Return (seconds of an update, change), fastest first; of each layout the least recompute that fits.

    They are tried with engines of the most tensor parallelism, which take the least memory.
    """
    when, random = _at(config), np.random.default_rng(1)
    stage = config.stages[when.index]
    workload = workload_at(stage, lengths, when, random)
    share = 1.0 if stage.refill_prompts else lengths.kept_share
    sequences = kept_sequences(stage, workload.sequences[: stage.prompts_per_step], share, random)
    widest = max(size for size in _SIZES if engine_gpus % size == 0 and _divides(machine.shape, size))
    light = {"rollout.tensor_parallel": widest, "rollout.engines": engine_gpus // widest}
    found = []
    for tensor, pipeline, context in product(_SIZES, _SIZES, _CONTEXTS):
        if ranks % (tensor * pipeline * context):
            continue
        for recompute in _RECOMPUTE:
            change = {
                "parallel.ranks": ranks,
                "parallel.tensor": tensor,
                "parallel.pipeline": pipeline,
                "parallel.context": context,
                "parallel.sequence": tensor > 1,
                "parallel.recompute": recompute,
                "parallel.virtual_pipeline": 1,
                "parallel.layers_per_stage": None,
                "parallel.micro_batch_tokens": _budget(config, tensor, context),
            }
            made = _possible(config, machine, change | light)
            if made is not None:
                spent = update_time(made, machine.shape, machine.rates, sequences, stage.reuse).seconds
                found.append((spent, change))
                break
    return sorted(found, key=lambda each: each[0])


def _divides(shape: Shape, tensor: int) -> bool:
    """Return whether an engine of this size can hold the model."""
    return shape.heads % tensor == 0 and (shape.kv_heads % tensor == 0 or tensor % shape.kv_heads == 0)


def _budget(config: Config, tensor: int, context: int) -> int:
    """Return one and a half times the longest sequence, as rows are padded."""
    parallel = config.parallel.model_copy(update={"tensor": tensor, "context": context})
    made = config.model_copy(update={"parallel": parallel})
    return max(padded_sequence(made, stage) for stage in config.stages) * 3 // 2


def _engines(
    config: Config, machine: Machine, lengths: Lengths, ranks: int, engine_gpus: int
) -> list[tuple[float, dict[str, Any]]]:
    """Return (seconds of a rollout, change), fastest first."""
    when = _at(config)
    workload = workload_at(config.stages[when.index], lengths, when, np.random.default_rng(1))
    found = []
    for change in _engine_changes(engine_gpus, workload.response_tokens.size):
        if not _divides(machine.shape, change["rollout.tensor_parallel"]):
            continue
        made = changed(config, {"parallel.ranks": ranks, **change})
        if made is None or engine_clock(made, machine.shape, machine.rates).kv_tokens < config.longest_sequence:
            continue
        found.append((sample(made, machine, workload).judged_s, change))
    return sorted(found, key=lambda each: each[0])


def _engine_changes(gpus: int, responses: int) -> Iterator[dict[str, Any]]:
    """Yield engines of each size, with places for all their responses at once and for half of them."""
    for tensor in _SIZES:
        if gpus % tensor:
            continue
        engines = gpus // tensor
        enough = next((places for places in _PLACES if places * engines >= responses), _PLACES[-1])
        for places in dict.fromkeys((enough, max(_PLACES[0], enough // 2))):
            yield {
                "rollout.engines": engines,
                "rollout.tensor_parallel": tensor,
                "rollout.max_concurrent": places,
            }


def _trainer(config: Config) -> str:
    parallel = config.parallel
    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "DP": parallel.data}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) + f", {parallel.recompute} recompute"


def _engine(config: Config) -> str:
    rollout = config.rollout
    return f"{rollout.engines} x TP {rollout.tensor_parallel}, {rollout.max_concurrent} at once, {rollout.placement}"


def layout_yaml(best: RankedLayout, title: str, config: Config) -> bytes:
    """Return a layout file with the change of ``best``."""
    sections: dict[str, dict[str, Any]] = {"parallel": {}, "rollout": {}}
    for key, value in best.change.items():
        section, name = key.split(".")
        sections[section][name] = value
    if config.cluster.gpu_memory_gb is not None:
        sections["cluster"] = {"gpu_memory_gb": config.cluster.gpu_memory_gb}
    lines = [f"# {title}: {best.trainer}; engines {best.engines}.", "# Found by `or1 plan --search`.", "base: gpu"]
    for section, values in sections.items():
        lines.append(f"{section}:")
        lines += [f"  {name}: {json.dumps(value)}" for name, value in values.items()]
    return ("\n".join(lines) + "\n").encode()
