"""The nearest change of a configuration that fits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, Final

from pydantic import ValidationError

from or1_megatron.config.schema import Config
from or1_megatron.sizing.conflicts import Device, conflicts, padded_sequence
from or1_megatron.sizing.memory import needed, process_memory
from or1_megatron.weights.shape import Shape

_LARGEST: Final = 3
"""Keys that are changed together, at most."""

Change = Mapping[str, Any]
"""Values by dotted key."""


def changed(config: Config, change: Change) -> Config | None:
    """Return ``config`` with ``change``; None where the schema refuses it."""
    data = config.model_dump(mode="json")
    for key, value in change.items():
        section, name = key.split(".")
        data[section][name] = value
    try:
        return Config.model_validate(data)
    except ValidationError:
        return None


def fits(config: Config, shape: Shape, device: Device, there: int) -> bool:
    return needed(config, process_memory(config, shape, device), device) <= there


def nearest_fit(config: Config, shape: Shape, device: Device, there: int) -> Change | None:
    """Return the change that fits ``there`` bytes with the fewest keys, those that cost least time first; None: none.

    A change of the layout keeps the number of devices, and causes no conflict.
    """
    gentle = list(_gentle(config, device))
    for count in range(1, _LARGEST + 1):
        for chosen in combinations(gentle, count):
            change = {key: value for one in chosen for key, value in one.items()}
            if len(change) < sum(map(len, chosen)):
                continue  # two values for one key
            made = changed(config, change)
            if made is None or next(conflicts(made, shape, None, device), None) is not None:
                continue
            if fits(made, shape, device, there):
                return change
    return None


def _gentle(config: Config, device: Device) -> Iterator[Change]:
    """Yield changes that lower memory, in the order of what they cost."""
    parallel, rollout = config.parallel, config.rollout
    longest = max(padded_sequence(config, stage) for stage in config.stages)
    if device == "cpu" and config.checkpoint.asynchronous:
        yield {"checkpoint.asynchronous": False}
    for budget in (longest * 3 // 2, longest):
        if budget < parallel.micro_batch_tokens:
            yield {"parallel.micro_batch_tokens": budget}
    for recompute in ("selective", "full")[("none", "selective", "full").index(parallel.recompute) :]:
        yield {"parallel.recompute": recompute}
    if not parallel.distributed_optimizer and parallel.data > 1:
        yield {"parallel.distributed_optimizer": True}
    for by in (2, 4):
        if rollout.max_concurrent >= 2 * by:
            yield {"rollout.max_concurrent": rollout.max_concurrent // by}
    if device == "cpu" and rollout.engines > 1:
        yield {"rollout.engines": 1}
    if device == "cuda":
        for by in (2, 4, 8):
            if rollout.engines % by == 0:
                engines = {"rollout.tensor_parallel": rollout.tensor_parallel * by}
                yield engines | {"rollout.engines": rollout.engines // by}
        for by in (2, 4, 8):
            if parallel.tensor * by <= 8:
                yield {"parallel.tensor": parallel.tensor * by, "parallel.sequence": True}
            yield {"parallel.pipeline": parallel.pipeline * by}
