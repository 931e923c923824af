"""Who would send what to whom with ``handoff.backend: shard``, without starting anything: ``or1 plan-handoff``.

A run finds out what the engines' loaders ask for by running them (``handoff.vllm.loader_trace``). Here it is taken from
how vLLM cuts the layers of the known families; a test compares the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from or1_megatron.config.schema import Config, ParallelConfig
from or1_megatron.handoff.message.buckets import Slice
from or1_megatron.handoff.message.message import Hop
from or1_megatron.handoff.shard.plan import HandoffPlan, make_plan
from or1_megatron.handoff.shard.routes import choose_transport, round_bytes, routes_for
from or1_megatron.handoff.transport.links import Location
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.holdings import Box, RankGrid, holdings, whole
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import ModelFamily, Row

_VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it cuts it


def expected_wants(family: ModelFamily, hf: Mapping[str, Any], dtype: torch.dtype, rank: int, size: int) -> list[Slice]:
    """Return what the loaders of tensor-parallel engine rank ``rank`` of ``size`` ask for."""
    shapes = family.shapes(hf)
    return [
        Slice(name, _part(row, name, shapes[name], hf, rank, size), dtype) for row in family.rows(hf) for name in row.hf
    ]


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
    """Return the function from a row to the pipeline stage that holds it."""
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
    """A plan and its bytes. Ranks are numbered as in the plan: the trainer's, then the engines'."""

    plan: HandoffPlan
    dtype: str
    links: dict[Hop, int]
    """Bytes by (from, to)."""
    wanted: list[int]
    """Bytes of each engine rank's shard."""
    transport: str

    def crosses(self, hop: Hop) -> bool:
        """Return whether a hop takes the network: with two hops, from a trainer rank to an engine rank does not."""
        return not ("+" in self.transport and hop[0] < self.plan.trainers <= hop[1])

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that ranks put on the network, by rank, including what they pass on."""
        return self._by_rank(0)

    def _by_rank(self, end: int) -> dict[int, int]:
        """Return the bytes on the network by the rank that sends (``end`` 0) or receives them (1)."""
        total = defaultdict[int, int](int)
        for hop, size in self.links.items():
            if self.crosses(hop):
                total[hop[end]] += size
        return dict(total)

    @property
    def received(self) -> dict[int, int]:
        """Bytes by engine rank, from 0, over the network or not."""
        total = defaultdict[int, int](int)
        for (_, stop), size in self.links.items():
            if stop >= self.plan.trainers:
                total[stop - self.plan.trainers] += size
        return dict(total)

    @property
    def busiest(self) -> int:
        """Bytes through the busiest rank's link, in or out."""
        return max([*self.sent.values(), *self._by_rank(1).values()], default=0)

    def seconds(self, gigabits_per_s: float) -> float:
        """Return the time of the busiest link, at a speed per rank and direction, without packing and loading."""
        return self.busiest * 8 / (gigabits_per_s * 1e9)


def forecast(
    hf: Mapping[str, Any],
    dtype: str,
    parallel: ParallelConfig,
    engines: int,
    tensor: int,
    bucket_bytes: int,
    transport: str,
) -> HandoffForecast:
    """Plan ``handoff.backend: shard`` for a model on this layout, to ``engines`` of ``tensor`` ranks each.

    ``transport``: as ``handoff.transport``. In two hops the engines' ranks are beside the trainer's, one after another.
    """
    family = family_of(hf)
    shapes = family.shapes(hf)
    grid = RankGrid(parallel.tensor, parallel.context * parallel.data, parallel.pipeline, parallel.expert)
    experts = family.experts(hf)
    local_experts = 0 if experts is None else experts.count // parallel.expert

    def expert_rank(row: Row) -> int | None:
        return None if row.expert is None else row.expert // local_experts

    held = holdings(family.rows(hf), hf, shapes, stage_of(parallel, hf), grid, expert_rank=expert_rank)
    wants = [expected_wants(family, hf, getattr(torch, dtype), rank, tensor) for rank in range(tensor)] * engines
    somewhere = Location("", "")
    routes = routes_for(transport, [somewhere] * parallel.ranks, [somewhere] * len(wants))
    plan = make_plan(held, wants, parallel.ranks, round_bytes(transport, bucket_bytes), routes)
    wanted = [sum(want.size_bytes for want in each) for each in wants[:tensor]] * engines
    return HandoffForecast(plan, dtype, plan.link_bytes(), wanted, transport)


def forecast_of(config: Config) -> HandoffForecast:
    """Plan for a run's configuration. Without ``handoff.transport`` it is taken to run on CPU."""
    hf = read_hf_config(config.model.hf)
    rollout, handoff = config.rollout, config.handoff
    engines_at = Location("first node" if config.cluster.nodes == 1 else "another node", "")
    transport = handoff.transport or choose_transport([Location("first node", "")], [engines_at])
    return forecast(
        hf,
        config.model.dtype,
        config.parallel,
        rollout.engines,
        rollout.tensor_parallel,
        handoff.bucket_bytes,
        transport,
    )
