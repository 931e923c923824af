"""``or1 plan-handoff``: who would send what to whom, without starting anything.

What the engines' loaders ask for is known only to them; here it is taken from how vLLM cuts the layers of the known
families. A run records it (``handoff.recording``), and a test compares the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from or1_megatron.config import Config, ParallelConfig
from or1_megatron.handoff.plan import HandoffPlan, Want, make_plan
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.holdings import Box, RankGrid, box_size, holdings, whole
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import ModelFamily, Row

_VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it cuts it
_SHOWN = 12


def expected_wants(family: ModelFamily, hf: Mapping[str, Any], rank: int, size: int) -> list[Want]:
    """What the loaders of tensor-parallel engine rank ``rank`` of ``size`` ask for."""
    shapes = family.shapes(hf)
    return [Want(name, _part(row, name, shapes[name], hf, rank, size)) for row in family.rows(hf) for name in row.hf]


def _part(row: Row, name: str, shape: tuple[int, ...], hf: Mapping[str, Any], rank: int, size: int) -> Box:
    box = list(whole(shape))
    if row.cut is Cut.ROW:
        columns = shape[1] // size
        box[1] = (rank * columns, (rank + 1) * columns)
    elif row.cut is Cut.VOCABULARY:
        rows = -(-shape[0] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE // size
        box[0] = (min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0]))
    elif row.cut is not Cut.WHOLE:
        heads = hf["num_key_value_heads"]
        if (".k_proj." in name or ".v_proj." in name) and heads < size:  # each key/value head on several ranks
            rows, rank = shape[0] // heads, rank * heads // size
        else:
            rows = shape[0] // size
        box[0] = (rank * rows, (rank + 1) * rows)
    return tuple(box)


def stage_of(parallel: ParallelConfig, hf: Mapping[str, Any]) -> Any:
    """The function from a row to the pipeline stage that holds it."""
    stages = {
        layer: index % parallel.pipeline
        for index, layers in enumerate(parallel.chunk_layers(hf["num_hidden_layers"]))
        for layer in layers
    }

    def stage(row: Row) -> int:
        parts = row.megatron.split(".")
        if parts[:2] == ["decoder", "layers"]:
            return stages[int(parts[2])]
        return 0 if parts[0] == "embedding" else parallel.pipeline - 1

    return stage


@dataclass(frozen=True)
class HandoffForecast:
    """A plan with what its bytes come to."""

    plan: HandoffPlan
    dtype: str
    sent: dict[int, int]
    """Bytes by trainer rank."""
    received: dict[int, int]
    """Bytes by engine rank, from 0."""
    links: dict[tuple[int, int], int]
    """Bytes by (trainer rank, engine rank)."""
    wanted: list[int]
    """Bytes of each engine rank's shard."""

    @property
    def busiest(self) -> int:
        """Bytes through the busiest rank's link, in or out."""
        return max([*self.sent.values(), *self.received.values()], default=0)

    def seconds(self, gigabits_per_s: float) -> float:
        """What the busiest link needs, at a speed per rank and direction; packing and loading come on top."""
        return self.busiest * 8 / (gigabits_per_s * 1e9)


def forecast(
    hf: Mapping[str, Any], dtype: str, parallel: ParallelConfig, engines: int, tensor: int, bucket_bytes: int
) -> HandoffForecast:
    """The plan of ``handoff.backend: shard`` for a model on this layout to ``engines`` of ``tensor`` ranks each."""
    family = family_of(hf)
    shapes = family.shapes(hf)
    grid = RankGrid(parallel.tensor, parallel.context * parallel.data, parallel.pipeline, parallel.expert)
    experts = family.experts(hf)
    local_experts = 0 if experts is None else experts.count // parallel.expert

    def expert_rank(row: Row) -> int | None:
        return None if row.expert is None else row.expert // local_experts

    held = holdings(family.rows(hf), hf, shapes, stage_of(parallel, hf), grid, expert_rank=expert_rank)
    wants = [expected_wants(family, hf, rank, tensor) for rank in range(tensor)] * engines
    element = getattr(torch, dtype)
    plan = make_plan(held, dict.fromkeys(shapes, element), wants, parallel.ranks, bucket_bytes)
    sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
    links = {}
    for (source, destination), size in plan.link_bytes().items():
        sent[source] += size
        received[destination - parallel.ranks] += size
        links[source, destination - parallel.ranks] = size
    wanted = [sum(box_size(want.box) for want in each) * element.itemsize for each in wants]
    return HandoffForecast(plan, dtype, dict(sent), dict(received), links, wanted)


def forecast_of(config: Config) -> HandoffForecast:
    """Of a run's configuration."""
    hf = read_hf_config(config.model.hf)
    rollout = config.rollout
    return forecast(
        hf, config.model.dtype, config.parallel, rollout.engines, rollout.tensor_parallel, config.handoff.bucket_bytes
    )


def print_forecast(made: HandoffForecast, gigabits_per_s: float, console: Console) -> None:
    """Who sends what to whom; of many links those with the most bytes."""
    table = Table(title="links, busiest first")
    for column in ("trainer rank", "engine rank", "MiB", "buckets"):
        table.add_column(column, justify="right")
    buckets = defaultdict[tuple[int, int], int](int)
    for shipment in made.plan.shipments:
        buckets[shipment.source, shipment.destination - made.plan.trainers] += 1
    for link in sorted(made.links, key=lambda link: (-made.links[link], link))[:_SHOWN]:
        table.add_row(str(link[0]), str(link[1]), _mib(made.links[link]), str(buckets[link]))
    if len(made.links) > _SHOWN:
        table.add_row("...", f"{len(made.links) - _SHOWN} more", "", "")
    console.print(table)
    total = sum(made.sent.values())
    slices = sum(len(shipment.bucket.slots) for shipment in made.plan.shipments)
    console.print(f"{_mib(total)} MiB ({made.dtype}) in {slices:,} slices, {len(made.plan.shipments):,} buckets")
    idle = made.plan.trainers - len(made.sent)
    console.print(
        f"each trainer rank sends {_mib(min(made.sent.values()))} to {_mib(max(made.sent.values()))} MiB"
        + (f"; {idle} send nothing" if idle else "")
    )
    shares = [made.received[rank] / wanted for rank, wanted in enumerate(made.wanted) if wanted]
    console.print(
        f"each engine rank receives {_mib(min(made.received.values()))} to {_mib(max(made.received.values()))} MiB, "
        f"{max(shares):.2f} times its shard at most"
    )
    console.print(
        f"busiest rank: {_mib(made.busiest)} MiB, {made.seconds(gigabits_per_s):.3g} s at {gigabits_per_s:g} Gb/s"
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f}"
