"""A ``WeightSource`` of the policy for each of vLLM's own weight-transfer backends.

All declare the whole model on every rank. They differ in what iterating yields:

    rank 0 everything, others nothing       nccl
    every rank everything                   ipc: each shares it with the engine rank on its GPU
    every rank what its stage holds         sharded_rdt: whole tensors, gathered over TP; experts where they are
    every rank its own shard                nccl_m2n, with the layout

They pass vLLM's own checks of sources on CPU. The backends themselves have not been run: they need GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.m2n_common import REPLICATE, REPLICATED, M2NMesh, M2NParamMeta, Placements
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

from or1_megatron.interfaces import PolicyWeights
from or1_megatron.weights.holdings import Holding, whole


class ShardsSource(WeightSource):
    """Yields every tensor on rank 0; the others iterate to take part in the collectives."""

    def __init__(self, weights: PolicyWeights, sends: bool = True) -> None:
        """``sends``: this is rank 0."""
        self._weights, self._sends = weights, sends

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self._weights.metadata()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            if tensor is None and self._sends:
                raise ValueError(f"weights: the sending rank was given no tensor for '{name}'")
            yield name, tensor  # type: ignore[misc]  # not read on other ranks


class EverywhereSource(ShardsSource):
    """Yields every tensor on every rank."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights.everywhere()


class HeldSource(ShardsSource):
    """Yields, on every rank, what its pipeline stage and its expert-parallel rank hold, gathered over TP."""

    def held_names(self) -> Collection[str]:
        return self._weights.held_names()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield exactly ``groups()``: groups of which something is held, with None for what is not."""
        held = self._weights.held()
        names = self._weights.held_names()
        for group in self.groups():
            for name in group:
                if name not in names:
                    yield name, None  # type: ignore[misc]  # as the protocol asks
                    continue
                found, tensor = next(held)
                if found != name:
                    raise ValueError(f"weights: '{found}' came where metadata() has '{name}'")
                yield name, tensor


class MeshSource(M2NWeightSource):
    """Yields, on every rank, its own shards, on a mesh of (replicas, tensor-parallel ranks)."""

    def __init__(self, weights: PolicyWeights, rank: int) -> None:
        self._weights, self._rank = weights, rank
        self._dims = (weights.ranks // weights.tensor_ranks, weights.tensor_ranks)
        self._boxes: dict[str, list[Holding]] = {}
        for holding in weights.holdings():
            self._boxes.setdefault(holding.name, []).append(holding)

    def mesh(self) -> M2NMesh:
        return M2NMesh(self._dims, 0)

    def metadata(self) -> list[ParamMeta]:
        """Declare tensors and placements. Raises ValueError for a tensor that is not cut evenly along one axis."""
        return [
            M2NParamMeta(name, dtype, tuple(shape), self._placements(name, tuple(shape)))
            for name, dtype, shape in self._weights.metadata()
        ]

    def _placements(self, name: str, shape: tuple[int, ...]) -> Placements | None:
        held, tensor = self._boxes[name], self._dims[1]
        if len(held) == 1 and held[0].box == whole(shape) and len(held[0].ranks) == self._dims[0] * tensor:
            return REPLICATED
        by_rank = {rank: holding.box for holding in held for rank in holding.ranks}
        for axis, size in enumerate(shape):
            part = size // tensor
            even = {
                rank: (
                    *whole(shape[:axis]),
                    (rank % tensor * part, (rank % tensor + 1) * part),
                    *whole(shape[axis + 1 :]),
                )
                for rank in range(self._dims[0] * tensor)
            }
            if size % tensor == 0 and len(held) == tensor and by_rank == even:
                return (REPLICATE, axis)
        raise ValueError(
            f"handoff.backend = nccl_m2n cannot send '{name}' {shape}: the trainer does not have it cut evenly along "
            f"one axis over {tensor} tensor-parallel ranks"
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, _, _ in self._weights.metadata():
            box = next(holding.box for holding in self._boxes[name] if self._rank in holding.ranks)
            yield name, self._weights.read(name, box).contiguous()
