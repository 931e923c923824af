"""Finds the layouts of a number of GPUs that fit in memory, and ranks them by the hours of the run.

A colocated step is the sum of trainer and engine times, so each side's candidates are timed on their own, at the
middle of the longest stage; the best of both are then combined, checked, and timed as a whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from or1_megatron.config.schema import Config
from or1_megatron.config.yaml_reader import dump
from or1_megatron.plan.clocks import engine_clock
from or1_megatron.plan.lengths import Lengths, Moment
from or1_megatron.plan.run_time import RunTime, run_time
from or1_megatron.plan.step_time import Machine, kept_sequences, sample, workload_at
from or1_megatron.plan.update_time import update_time
from or1_megatron.sizing.conflicts import conflicts, head_conflicts, longest_row
from or1_megatron.sizing.memory import needed, process_memory

_SIZES: Final = (1, 2, 4, 8)
_CONTEXTS: Final = (1, 2, 4)
_RECOMPUTE: Final = ("none", "selective", "full")
_PLACES: Final = (64, 128, 256, 512)
"""max_concurrent."""
_TIMED: Final = 4
"""Combinations that are timed as a whole run, for each split of the GPUs."""
_SHARES: Final = (0.25, 0.5, 0.75)
"""Share of the GPUs that the trainer gets, if engines have their own."""

Change = Mapping[str, Any]
"""Values by dotted key."""


@dataclass(frozen=True, slots=True)
class RankedLayout:
    """A layout that fits."""

    change: Change
    config: Config
    time: RunTime

    @property
    def trainer(self) -> str:
        parallel = self.config.parallel
        sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "DP": parallel.data}
        shown = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return f"{shown}, {parallel.recompute} recompute"

    @property
    def engines(self) -> str:
        rollout = self.config.rollout
        size = f"{rollout.engines} x TP {rollout.tensor_parallel}"
        return f"{size}, {rollout.max_concurrent} at once, {rollout.placement}"


def changed(config: Config, change: Change) -> Config | None:
    """Return ``config`` with ``change``; None where the schema refuses it."""
    data = config.model_dump(mode="json")
    for section, values in _sections(change).items():
        data[section] |= values
    try:
        return Config.model_validate(data)
    except ValidationError:
        return None


def search(config: Config, machine: Machine, lengths: Lengths, gpus: int | None = None) -> list[RankedLayout]:
    """Return the best layouts on ``gpus`` devices (as many as ``config`` takes), fastest first; empty: none fits."""
    count = gpus or config.parallel.ranks
    ranked: list[RankedLayout] = []
    for ranks, engine_gpus in _splits(config, count):
        trainers = _trainers(config, machine, lengths, ranks, engine_gpus)
        engines = _engines(config, machine, lengths, ranks, engine_gpus)
        timed = 0
        for (_, trainer), (_, engine) in sorted(product(trainers, engines), key=lambda both: both[0][0] + both[1][0]):
            change = {"parallel.ranks": ranks, **trainer, **engine}
            made = _possible(config, machine, change) if timed < _TIMED else None
            if made is not None:
                timed += 1
                ranked.append(RankedLayout(change, made, run_time(made, machine, lengths)))
    return sorted(ranked, key=lambda layout: layout.time.hours)


def _splits(config: Config, count: int) -> list[tuple[int, int]]:
    """Return pairs (trainer ranks, engine GPUs); colocated, both are all GPUs."""
    if config.rollout.placement == "colocated":
        return [(count, count)]
    return [(int(count * share), count - int(count * share)) for share in _SHARES]


def _possible(config: Config, machine: Machine, change: Change) -> Config | None:
    """Return the changed configuration if it works and fits, else None."""
    made = changed(config, change)
    if made is None or next(conflicts(made, machine.shape, None, "cuda"), None) is not None:
        return None
    wanted = needed(made, process_memory(made, machine.shape, "cuda"), "cuda")
    return made if wanted <= machine.rates.memory_bytes else None


def _at(config: Config) -> Moment:
    """Return the middle of the stage with the largest steps * T."""
    tokens = [stage.steps * stage.max_response_tokens for stage in config.stages]
    index = tokens.index(max(tokens))
    return Moment(config.stages, index, config.stages[index].steps / 2)


def _trainers(
    config: Config, machine: Machine, lengths: Lengths, ranks: int, engine_gpus: int
) -> list[tuple[float, dict[str, Any]]]:
    """Return (seconds of an update, change), fastest first; each layout with the least recompute that fits.

    Memory is checked with engines of the largest tensor parallelism, which take the least.
    """
    when, random = _at(config), np.random.default_rng(1)
    stage = config.stages[when.index]
    workload = workload_at(stage, lengths, when, random)
    share = 1.0 if stage.refill_prompts else lengths.kept_share
    sequences = kept_sequences(stage, workload.sequences[: stage.prompts_per_step], share, random)
    widest = max(_engine_sizes(machine, engine_gpus))
    light = {"rollout.tensor_parallel": widest, "rollout.engines": engine_gpus // widest}
    timed = []
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
                timed.append((spent, change))
                break
    return sorted(timed, key=lambda candidate: candidate[0])


def _budget(config: Config, tensor: int, context: int) -> int:
    """Return 1.5 times the padded length of the longest sequence, in tokens."""
    parallel = config.parallel.model_copy(update={"tensor": tensor, "context": context})
    made = config.model_copy(update={"parallel": parallel})
    return longest_row(made) * 3 // 2


def _engines(
    config: Config, machine: Machine, lengths: Lengths, ranks: int, engine_gpus: int
) -> list[tuple[float, dict[str, Any]]]:
    """Return (seconds of a rollout, change), fastest first: engines of each size, with ``max_concurrent`` for all
    their responses and for half of them."""
    when = _at(config)
    workload = workload_at(config.stages[when.index], lengths, when, np.random.default_rng(1))
    timed = []
    for tensor in _engine_sizes(machine, engine_gpus):
        engines = engine_gpus // tensor
        enough = next((places for places in _PLACES if places * engines >= workload.response_tokens.size), _PLACES[-1])
        for places in dict.fromkeys((enough, max(_PLACES[0], enough // 2))):
            change = {
                "rollout.engines": engines,
                "rollout.tensor_parallel": tensor,
                "rollout.max_concurrent": places,
            }
            made = changed(config, {"parallel.ranks": ranks, **change})
            if made is None or engine_clock(made, machine.shape, machine.rates).kv_tokens < config.longest_sequence:
                continue
            timed.append((sample(made, machine, workload)[1], change))
    return sorted(timed, key=lambda candidate: candidate[0])


def _engine_sizes(machine: Machine, gpus: int) -> Iterator[int]:
    """Yield the sizes of engines that divide the GPUs and the model's heads."""
    for size in _SIZES:
        if gpus % size == 0 and next(head_conflicts("rollout.tensor_parallel", size, machine.shape), None) is None:
            yield size


def layout_yaml(best: RankedLayout, title: str) -> bytes:
    """Return a layout file with the change of ``best``."""
    sections: dict[str, Any] = {"base": "gpu", **_sections(best.change)}
    if (size_gb := best.config.cluster.gpu_memory_gb) is not None:
        sections["cluster"] = {"gpu_memory_gb": size_gb}
    heading = f"# {title}: {best.trainer}; engines {best.engines}.\n# Found by `or1 plan --search`.\n"
    return (heading + dump(sections)).encode()


def _sections(change: Change) -> dict[str, dict[str, Any]]:
    """Return the change as sections of a configuration file."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections
