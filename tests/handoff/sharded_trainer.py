"""A trainer of several ranks as threads of this process, each with its shards of an HF model, cut by the table.

Everything but Megatron is real: senders, status store, gloo group, engines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.sender import WeightSender
from or1_megatron.parallel.parity import by_file_name
from or1_megatron.weights.families import family_of
from or1_megatron.weights.holdings import Box, Holding, RankGrid, holdings, intersection, pieces
from or1_megatron.weights.slicing import cut
from or1_megatron.weights.table import Row


class Grid:
    """TP x replicas x PP ranks over one HF model. A test may replace ``model`` between handoffs."""

    def __init__(self, model: Any, tensor: int, replicas: int, pipeline: int) -> None:
        self.model = model
        self.hf = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        family = family_of(self.hf)
        self.shapes = family.shapes(self.hf)
        self.rows = list(family.rows(self.hf))
        self.grid = RankGrid(tensor, replicas, pipeline)
        self.world = tensor * replicas * pipeline
        self._barrier = threading.Barrier(self.world)
        self._told: Any = None

    def stage(self, row: Row) -> int:
        parts = row.megatron.split(".")
        if parts[:2] == ["decoder", "layers"]:
            return int(parts[2]) * self.grid.pipeline // self.hf["num_hidden_layers"]
        return 0 if parts[0] == "embedding" else self.grid.pipeline - 1

    def from_rank_0(self, rank: int, value: Any) -> Any:
        self._barrier.wait(240)  # all ranks have read the value before
        if rank == 0:
            self._told = value
        self._barrier.wait(240)
        return self._told

    def on_every_rank(self, call: Callable[[int], Any]) -> list[Any]:
        """Call a function on every rank; return the results by rank, or raise the error of the lowest rank with one."""
        with ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(call, rank) for rank in range(self.world)]
            return [future.result() for future in futures]


class RankWeights:
    """``interfaces.PolicyWeights`` of one rank."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self._grid, self._rank = grid, rank
        self.tensor_rank = rank % grid.grid.tensor
        self.stage = rank // (grid.grid.tensor * grid.grid.replicas)

    @property
    def ranks(self) -> int:
        return self._grid.world

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, self._grid.model.dtype, shape) for name, shape in self._grid.shapes.items()]

    def holdings(self) -> list[Holding]:
        grid = self._grid
        return holdings(grid.rows, grid.hf, grid.shapes, grid.stage, grid.grid)

    def from_rank_0(self, value: Any) -> Any:
        return self._grid.from_rank_0(self._rank, value)

    def read(self, name: str, box: Box) -> Tensor:
        grid, size = self._grid, self._grid.grid.tensor
        row = next(row for row in grid.rows if name in row.hf)
        assert grid.stage(row) == self.stage, f"rank {self._rank} does not hold {name}"
        state = by_file_name(grid.model, grid.model.state_dict())
        whole = row.layout.fuse([state[hf] for hf in row.hf], grid.hf)
        shard = cut(whole, row.cut, self.tensor_rank, size)
        for piece in pieces(row, grid.hf, grid.shapes, self.tensor_rank, size):
            if piece.name == name and intersection(box, piece.box) == box:
                place = tuple(
                    slice(there + start - low, there + stop - low)
                    for (start, stop), (low, _), (there, _) in zip(box, piece.box, piece.place, strict=True)
                )
                return shard[place]
        raise AssertionError(f"rank {self._rank} does not hold {name} at {box}")


class Trainer:
    """The weight senders of all ranks."""

    def __init__(self, grid: Grid, config: HandoffConfig, control: Any) -> None:
        self.grid = grid
        self.weights = [RankWeights(grid, rank) for rank in range(grid.world)]
        self.senders = [WeightSender(weights, rank, config, control) for rank, weights in enumerate(self.weights)]

    def send(self, version: int) -> list[int]:
        return self.grid.on_every_rank(lambda rank: self.senders[rank].send(version))

    def close(self) -> None:
        for sender in self.senders[1:] + self.senders[:1]:
            sender.close()
