"""Builds this rank's part of a model from an HF folder, and scores packed rows with the model (forward pass).

The policy and the frozen reference both use this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.parallel.cpu_device import device
from or1_megatron.parallel.device_row import DeviceRow, to_device
from or1_megatron.parallel.lora import Adapters
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.model import PolicyModel, transformer_config
from or1_megatron.parallel.router_replay import replay_in
from or1_megatron.parallel.schedule import forward
from or1_megatron.parallel.weights import HFTensors, ShardedWeights
from or1_megatron.sizing.parallel_layouts import choose_layers
from or1_megatron.types import Float32Array, MicroBatch
from or1_megatron.weights.families import family_of, read_hf_config


@dataclass(frozen=True)
class Network:
    """This rank's part of a model."""

    hf: Mapping[str, Any]
    config: TransformerConfig
    chunks: list[PolicyModel]
    """This rank's model chunks: more than one if the pipeline is interleaved."""
    weights: ShardedWeights
    adapters: Adapters | None
    """LoRA's adapters, the only weights that LoRA trains; None without LoRA."""


def build_network(model: ModelConfig, parallel: ParallelConfig, mesh: Mesh) -> Network:
    """Build this rank's chunks and fill them from ``model.hf``; collective.

    Raises:
        ModelError: the folder cannot be used.
        ValueError: the model does not fit the parallel layout.
    """
    hf = read_hf_config(model.hf)
    family = family_of(hf)
    kind = choose_layers(parallel, model.dtype).kind
    config = transformer_config(hf, family, parallel, model.dtype, kind)
    chunk_layers = parallel.chunk_layers(hf["num_hidden_layers"])
    chunks = [
        PolicyModel(hf, family, config, mesh, kind, chunk_layers, index).to(device())
        for index in range(parallel.virtual_pipeline)
    ]
    replay_in(chunks)
    weights = ShardedWeights(chunks, family, hf, mesh, chunk_layers)
    weights.mark_cut_parameters()
    weights.load_hf(HFTensors(model.hf, hf).get)
    lora = model.lora is not None
    adapters = Adapters(model, hf, chunks, weights, mesh, chunk_layers) if lora else None
    return Network(hf, config, chunks, weights, adapters)


def rows_on_device(mesh: Mesh, rows: Sequence[MicroBatch]) -> list[DeviceRow]:
    """Move this rank's part of each micro-batch to the rank's device."""
    return [to_device(row, device(), mesh.context_rank, mesh.context) for row in rows]


RowScores = tuple[Float32Array, Float32Array]
"""(log-probs, entropies) [C] of a micro-batch's counted tokens."""


def gather_scores(mesh: Mesh, scored: Sequence[Tensor]) -> list[list[RowScores]] | None:
    """Gather every micro-batch's scores [2, C] on rank 0 as [DP][micro-batches]; return None elsewhere. Collective.

    In each replica, the first tensor- and context-parallel rank of the last pipeline stage sends the scores.
    """
    reports = mesh.last_stage and mesh.tensor_rank == 0 and mesh.context_rank == 0
    local = mesh.data_rank, [tuple(both.numpy()) for both in scored] if reports else None
    gathered: list[Any] | None = [local] * mesh.world if mesh.rank == 0 else None
    if mesh.world > 1:
        dist.gather_object(local, gathered, dst=0, group=mesh.control)
    if gathered is None:
        return None
    by_replica = {replica: rows for replica, rows in gathered if rows is not None}
    return [by_replica[replica] for replica in range(mesh.data)]


def score_rows(
    mesh: Mesh, chunks: Sequence[torch.nn.Module], rows: Sequence[MicroBatch], temperature: float
) -> list[list[RowScores]] | None:
    """Score this data-parallel rank's micro-batches; return all replicas' scores as ``gather_scores`` does."""
    for chunk in chunks:
        chunk.eval()
    return gather_scores(mesh, forward(chunks, rows_on_device(mesh, rows), temperature))
