"""Gathers this rank's Megatron shards into whole HF tensors, by collectives, and cuts HF tensors into shards.

``or1_megatron.weights`` has the weights' HF and Megatron names, their memory layouts and their tensor-parallel cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from or1_megatron.parallel.cpu_device import device
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.model import PolicyModel
from or1_megatron.weights.adapters import AdapterTable
from or1_megatron.weights.decoder import unfused_name
from or1_megatron.weights.files import check_weight_files, open_weights, weight_files
from or1_megatron.weights.holdings import Box, Holding, Piece, RankGrid, holdings, intersection, pieces
from or1_megatron.weights.slicing import Cut, cut, join
from or1_megatron.weights.stacked_experts import part_of
from or1_megatron.weights.table import ModelFamily, Row

if TYPE_CHECKING:
    from or1_megatron.parallel.lora import Adapter

_GROUPED_EXPERT = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$")


class HFTensors:
    """Reads tensors by name from the safetensors files of an HF folder, sharded or not.

    Raises:
        ModelError: a file or tensor is missing, incomplete or unexpected, or a shape is not the config's.
    """

    def __init__(self, folder: Path, hf: Mapping[str, Any]) -> None:
        check_weight_files(folder, hf)
        self._files: dict[str, Any] = {}
        for path in weight_files(folder):
            file = open_weights(path)
            self._files.update(dict.fromkeys(file.keys(), file))

    def get(self, name: str) -> Tensor:
        if part := part_of(name):
            return part.of(self._files[part.stack].get_slice(part.stack)[part.expert])
        return self._files[name].get_tensor(name)


class ShardedWeights:
    """Implements ``interfaces.PolicyWeights``: holds this rank's shards of the weights, by row of the weight table."""

    def __init__(
        self,
        models: Sequence[PolicyModel],
        family: ModelFamily | AdapterTable,
        hf: Mapping[str, Any],
        mesh: Mesh,
        chunk_layers: Sequence[range],
    ) -> None:
        """
        Args:
            models: the model chunks on this rank.
            family: has the weight table's rows, for the model's own weights or for its adapters.
            chunk_layers: the layers of all chunks, in the model's order (``ParallelConfig.chunk_layers``).
        """
        self._hf, self._mesh = hf, mesh
        self.from_rank_0, self.ranks = mesh.from_rank_0, mesh.world
        self._grid = RankGrid(mesh.tensor, mesh.context * mesh.data, mesh.pipeline, mesh.expert)
        experts = family.experts(hf)
        self._local_experts = 0 if experts is None else experts.count // mesh.expert
        self._first_expert = mesh.expert_rank * self._local_experts
        self._parameters = {
            named_in_model(name, model.layers, self._first_expert): parameter
            for model in models
            for name, parameter in (*model.named_parameters(), *model.named_buffers())
        }
        self.readable: Callable[[Tensor], Tensor] = lambda parameter: parameter
        """Returns a parameter's values, maybe as a host tensor; ``__iter__`` copies host tensors to the device."""
        self.adapters: dict[str, Adapter] = {}
        """Adapters by the Megatron name of the weight that they adapt. Reading a weight merges its adapters in."""
        self._dtype = models[0].config.params_dtype
        self._rows = list(family.rows(hf))
        self._stage_of_layer = {
            layer: index % mesh.pipeline for index, layers in enumerate(chunk_layers) for layer in layers
        }
        self._shapes = family.shapes(hf)
        self._held: dict[str, list[tuple[Row, Piece]]] | None = None
        self._found: dict[tuple[str, Box], tuple[Row, tuple[slice, ...]]] = {}

    def _stage(self, row: Row) -> int:
        parts = row.megatron.split(".")
        if parts[:2] == ["decoder", "layers"]:
            return self._stage_of_layer[int(parts[2])]
        return 0 if parts[0] == "embedding" else self._mesh.pipeline - 1

    def _source(self, row: Row) -> int:
        """Return the first rank that holds a weight's first TP part; the next ranks hold the other parts."""
        return self._grid.ranks(self._stage(row), 0, self._expert_rank(row))[0]

    def local_rows(self) -> Iterator[tuple[Row, Tensor]]:
        """Yield (row of the weight table, its shard on this rank) for each parameter that this rank holds."""
        for row in self._rows:
            if self._stage(row) == self._mesh.pipeline_rank and row.megatron in self._parameters:
                yield row, self._parameters[row.megatron]

    def mark_cut_parameters(self) -> None:
        """Mark the parameters that TP cuts. The gradient norm counts unmarked parameters on only one TP rank."""
        for row, parameter in self.local_rows():
            if row.cut is not Cut.WHOLE:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = 1 if row.cut is Cut.ROW else 0  # type: ignore[attr-defined]
                parameter.partition_stride = 1  # type: ignore[attr-defined]

    @torch.no_grad()
    def load_hf(self, tensor: Callable[[str], Tensor]) -> None:
        """Fill the shards from HF tensors; ``tensor`` returns an HF tensor by name."""
        for row, parameter in self.local_rows():
            whole = row.layout.fuse([tensor(name) for name in row.hf], self._hf)
            shard = cut(whole, row.cut, self._mesh.tensor_rank, self._mesh.tensor)
            assert shard.shape == parameter.shape, f"{row.megatron}: {tuple(shard.shape)}, {tuple(parameter.shape)}"
            parameter.copy_(shard)
        self.tie_output_layer()

    @torch.no_grad()
    def tie_output_layer(self) -> None:
        """If the model ties its embeddings, and has several stages, copy the embedding to the last stage."""
        if not self._hf.get("tie_word_embeddings") or self._mesh.pipeline == 1:
            return
        if self._mesh.first_stage or self._mesh.last_stage:
            name = "embedding.word_embeddings.weight" if self._mesh.first_stage else "output_layer.weight"
            source = parallel_state.get_pipeline_model_parallel_first_rank()
            dist.broadcast(self._parameters[name], src=source, group=parallel_state.get_embedding_group())

    def _whole(self, row: Row) -> Tensor:
        part = self._values(row, (slice(None), slice(None))).to(device())
        if row.cut is Cut.WHOLE or self._mesh.tensor == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self._mesh.tensor)]
        dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
        return join(parts, row.cut)

    def _values(self, row: Row, place: tuple[slice, ...]) -> Tensor:
        """Return a rectangle of this rank's shard of a weight, with the weight's adapters merged in."""
        whole = self.readable(self._parameters[row.megatron].detach())
        values = whole[place[: whole.dim()]]
        adapter = self.adapters.get(row.megatron)
        return values if adapter is None else adapter.merged(values, place, self.readable)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return (HF name, dtype, shape) of every HF tensor, in iteration order."""
        return [(name, self._dtype_of(row), self._shapes[name]) for row in self._rows for name in row.hf]

    def _dtype_of(self, row: Row) -> torch.dtype:
        return torch.float32 if row.float32 else self._dtype

    def holdings(self) -> list[Holding]:
        """Return every part of every HF tensor with the trainer ranks that hold it."""
        return holdings(self._rows, self._hf, self._shapes, self._stage, self._grid, expert_rank=self._expert_rank)

    def _expert_rank(self, row: Row) -> int | None:
        return None if row.expert is None else row.expert // self._local_experts

    def read(self, name: str, box: Box) -> Tensor:
        """Return a rectangle of an HF tensor: a view of this rank's parameter, or a copy if adapters are merged in.

        Raises:
            KeyError: this rank does not hold the whole rectangle.
        """
        if (name, box) not in self._found:  # a handoff reads the same boxes again and again
            self._found[name, box] = self._find(name, box)
        row, place = self._found[name, box]
        return self._values(row, place)

    def _find(self, name: str, box: Box) -> tuple[Row, tuple[slice, ...]]:
        if self._held is None:
            self._held = self._pieces_by_name()
        for row, piece in self._held.get(name, ()):
            if intersection(box, piece.box) == box:
                place = tuple(
                    slice(start - low + there, stop - low + there)
                    for (start, stop), (low, _), (there, _) in zip(box, piece.box, piece.place, strict=True)
                )
                return row, place
        raise KeyError(f"rank {self._mesh.rank} does not hold '{name}' at {box}")

    def _pieces_by_name(self) -> dict[str, list[tuple[Row, Piece]]]:
        held: dict[str, list[tuple[Row, Piece]]] = {}
        for row, _ in self.local_rows():
            for piece in self.pieces_of(row):
                held.setdefault(piece.name, []).append((row, piece))
        return held

    def pieces_of(self, row: Row) -> list[Piece]:
        """Return the pieces of HF tensors that this rank's shard of a weight holds."""
        return pieces(row, self._hf, self._shapes, self._mesh.tensor_rank, self._mesh.tensor)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, whole HF tensor) in the weight table's order on rank 0, (name, None) elsewhere. Collective."""
        for row in self._rows:
            source = self._source(row)
            holds = source <= self._mesh.rank < source + self._mesh.tensor
            whole = self._whole(row) if holds else None
            parts: list[Tensor | None] = [None] * len(row.hf)
            if whole is not None and self._mesh.rank == source:
                parts = list(row.layout.split(whole, self._hf))
            for name, part in zip(row.hf, parts, strict=True):
                yield name, self._to_rank_0(part, source, self._shapes[name], self._dtype_of(row))

    def _to_rank_0(self, part: Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Bring a tensor from rank ``source`` to rank 0; return the tensor on rank 0, None elsewhere."""
        if source > 0:
            if self._mesh.rank == source:
                assert part is not None
                dist.send(part.contiguous(), dst=0)
                return None
            if self._mesh.rank == 0:
                whole = torch.empty(shape, dtype=dtype, device=device())
                dist.recv(whole, src=source)
                return whole
        return part if self._mesh.rank == 0 else None


def named_in_model(name: str, layers: range, first_expert: int) -> str:
    """Return a parameter's name with the indices of its layer and expert in the whole model, not those on this rank.

    The weight of one expert in a grouped product (``experts.linear_fc1.weight3``) gets the name that it has if experts
    are separate modules. A norm inside a linear (``linear_qkv.layer_norm_weight``) gets the name of a separate norm.
    """
    name = _GROUPED_EXPERT.sub(r"experts.local_experts.\2.\1.weight", unfused_name(name))
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        parts[at] = str(int(parts[at]) + first_expert)
    return ".".join(parts)
