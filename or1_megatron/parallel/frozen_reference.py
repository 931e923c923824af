"""The frozen reference model of the KL penalty: scores with an HF folder's model, sharded like the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.network import RowScores, build_network, score_rows
from or1_megatron.parallel.offload import HostCopy, distinct_storages
from or1_megatron.types import MicroBatch


class FrozenReference:
    """One rank's part of the reference model, without gradients and optimizer. Checkpoints do not hold it.

    Args:
        folder: HF folder, of the policy's architecture.
        dtype: the policy's dtype.
        parallel: the policy's parallel layout; ``mesh`` has this rank's index along each of its axes.
        offload: keep the weights on the host, except during a pass.
    """

    def __init__(self, folder: Path, dtype: str, parallel: ParallelConfig, mesh: Mesh, offload: bool) -> None:
        network = build_network(ModelConfig.model_validate({"hf": folder, "dtype": dtype}), parallel, mesh)
        self._mesh, self.chunks = mesh, network.chunks
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self._host = HostCopy() if offload else None
        self._leave()

    def score(self, rows: Sequence[MicroBatch], temperature: float) -> list[list[RowScores]] | None:
        """Score this data-parallel rank's micro-batches, as ``MegatronPolicy.score`` does; collective."""
        if self._host is not None:
            self._host.give_back()
        try:
            return score_rows(self._mesh, self.chunks, rows, temperature)
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._host is not None:
            self._host.take(distinct_storages(p.data for chunk in self.chunks for p in chunk.parameters()))
