"""The Megatron policy: scores, updates, saves and exports; every method runs on all trainer ranks at once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.interfaces import Objective
from or1_megatron.parallel.lockstep import raise_together
from or1_megatron.parallel.lora import Adapter
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.model import TORCH_DTYPE, PolicyModel
from or1_megatron.parallel.network import RowScores, build_network, gather_scores, rows_on_device, score_rows
from or1_megatron.parallel.offload import Offload
from or1_megatron.parallel.optimizer import build_optimizer, clip_and_step, learning_rate
from or1_megatron.parallel.router_replay import ExpertsPart, rerouted
from or1_megatron.parallel.schedule import forward_backward
from or1_megatron.runtime.timeline import span
from or1_megatron.types import Batch, MicroBatch, TokenScores, UpdateReport
from or1_megatron.weights.families import family_of
from or1_megatron.weights.stacked_experts import file_shapes, joined


class MegatronPolicy:
    """One rank's part of the policy.

    Args:
        model: the HF folder to start from, and the dtype.
        parallel: the parallel layout; ``mesh`` has this rank's index along each of its axes.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self.hf_folder = model.hf
        self.dtype = TORCH_DTYPE[model.dtype]
        self._one_pass = parallel.head == "one_pass"
        network = build_network(model, parallel, mesh)
        self.hf, self.networks, self.weights = network.hf, network.chunks, network.weights
        self.parts = mesh.of_every_rank(self._part(parallel))
        """For each rank, which of a batch's recorded expert ids the rank uses; None for a dense model."""
        self.whole_batch: Batch | None = None
        """On rank 0, the next call's batch if it has recorded expert ids. ``bring_experts`` sends them to the ranks."""
        self.adapters = network.adapters
        self.trained = network.weights if network.adapters is None else network.adapters.weights
        """What is trained, saved and loaded: all weights, or the adapters alone."""
        self.base: Mapping[str, str] = {} if network.adapters is None else network.adapters.base
        """With LoRA: folder and digest of the model that the adapters are for."""
        config = network.config
        config.finalize_model_grads_func = span("sum gradients", waits_for="other ranks")(finalize_model_grads)
        self.parameter_count, self.trained_count = (
            sum(math.prod(shape) for _, _, shape in weights.metadata()) for weights in (self.weights, self.trained)
        )
        """Number of parameters, and of trained parameters, of the whole model over all ranks."""
        self.chunks = [
            _data_parallel(network, parallel, mesh, first_chunk=index == 0)
            for index, network in enumerate(self.networks)
        ]
        if parallel.overlap_grad_reduce:  # else gradients would count as complete after each micro-batch
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._optimizer_config = optimizer
        self.optimizer = build_optimizer(self.chunks, optimizer, parallel, self.dtype)
        self.host = Offload(self.chunks, self.optimizer)
        """Moves this rank's state off its device and back."""
        self.weights.readable = self.trained.readable = self.host.readable
        self.sgd_steps = 0

    def score(self, rows: Sequence[MicroBatch], temperature: float) -> list[list[RowScores]] | None:
        """Score this data-parallel rank's micro-batches with the policy, as ``network.score_rows`` does; collective."""
        self.host.require("score", "parameters")
        return score_rows(self.mesh, self.chunks, rows, temperature)

    def score_base(self, rows: Sequence[MicroBatch], temperature: float) -> list[list[RowScores]] | None:
        """Score without the adapters, so that LoRA needs no second copy of the initial model. Collective."""
        Adapter.enabled = False
        try:
            return self.score(rows, temperature)
        finally:
            Adapter.enabled = True

    def update(self, rows: Sequence[MicroBatch], objective: Objective, token_count: int) -> UpdateReport:
        """Take an optimizer step on this data-parallel rank's micro-batches.

        ``token_count`` is the batch's number of counted tokens, for the report. Megatron divides by its own count.
        """
        return self.update_and_score(rows, objective, token_count)[0]

    def update_and_score(
        self, rows: Sequence[MicroBatch], objective: Objective, token_count: int
    ) -> tuple[UpdateReport, list[list[RowScores]] | None]:
        """Take an optimizer step; return (report, the forward pass's scores, in the form that ``score`` returns)."""
        self.host.require("update", "parameters", "gradients", "optimizer")
        started_s = time.perf_counter()
        for network, chunk in zip(self.networks, self.chunks, strict=True):
            network.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        there = rows_on_device(self.mesh, rows)
        outputs = forward_backward(self.chunks, there, objective, self._one_pass)
        routing = rerouted((row.row for row in there), self.parts[self.mesh.rank])
        sums = self._total([sums for sums, _ in outputs], routing)
        differentiated_s = time.perf_counter()
        rate = learning_rate(self._optimizer_config, self.sgd_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with span("optimizer"):
            grad_norm, skipped = clip_and_step(self.optimizer, sums["loss"])
        self.sgd_steps += not skipped
        finished_s = time.perf_counter()
        report = UpdateReport(
            sums=sums,
            token_count=token_count,
            grad_norm=grad_norm,
            learning_rate=rate,
            skipped=skipped,
            forward_backward_s=differentiated_s - started_s,
            optimizer_s=finished_s - differentiated_s,
        )
        return report, gather_scores(self.mesh, [scored for _, scored in outputs])

    def _part(self, parallel: ParallelConfig) -> ExpertsPart | None:
        mesh, experts = self.mesh, family_of(self.hf).experts(self.hf)
        if experts is None:
            return None
        here = [layer for network in self.networks for layer in network.layers if layer in experts.layers]
        sequence = (mesh.tensor_rank, mesh.tensor) if parallel.sequence else (0, 1)
        layers = tuple(experts.layers.index(layer) for layer in here)
        return ExpertsPart(mesh.data_rank, (mesh.context_rank, mesh.context), sequence, layers, experts)

    def _total(
        self, per_micro_batch: Sequence[Mapping[str, torch.Tensor]], of_rank: Mapping[str, float]
    ) -> dict[str, float]:
        """Return, by name, the sums over all replicas' micro-batches, and the sums of ``of_rank`` over all ranks.

        For a name that starts with ``max_``, return the maximum instead of the sum. Collective.
        """
        counts = self.mesh.last_stage and self.mesh.tensor_rank == 0
        local = _folded([{name: float(v) for name, v in sums.items()} for sums in per_micro_batch] if counts else [])
        return _folded(self.mesh.of_every_rank({**local, **of_rank}))


def _data_parallel(
    network: PolicyModel, parallel: ParallelConfig, mesh: Mesh, first_chunk: bool
) -> DistributedDataParallel:
    """Wrap a chunk so that its gradients are summed over data-parallel ranks.

    As in Megatron, only the model's first chunk has several buckets, because its gradients are complete last.
    """
    bucket = None
    if parallel.overlap_grad_reduce:  # Megatron's own default otherwise: buckets large enough for fast collectives
        bucket = parallel.grad_bucket_size or max(40_000_000, 1_000_000 * mesh.data)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        bucket_size=bucket,
    )
    layout = None
    if parallel.distributed_optimizer:
        layout = DistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in network.parameters() if parameter.requires_grad],
            bucket if first_chunk and mesh.first_stage else None,
            parallel_state.get_data_parallel_group(with_context_parallel=True).size(),
            config,
            parallel_state.get_expert_data_parallel_group().size(),
        )
    return DistributedDataParallel(
        network.config, config, network, disable_bucketing=not first_chunk, full_param_layout=layout
    )


def _folded(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return one value per name: the maximum over the parts if the name starts with ``max_``, else the sum."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                largest = float(np.maximum(total[name], value))  # unlike max(), it keeps a NaN
                total[name] = largest if name.startswith("max_") else total[name] + value
    return total


def unpack_scores(
    ranks: Sequence[Sequence[MicroBatch]],
    scored: Sequence[Sequence[RowScores]],
    sample_count: int,
) -> TokenScores:
    """Turn scores of packed micro-batches into one array per sample, in the samples' order.

    Args:
        ranks: the micro-batches, [DP][micro-batches].
        scored: for each micro-batch, (log-probs [C], entropies [C]) of the counted tokens, in the micro-batch's order.
    """
    empty = np.empty(0, dtype=np.float32)
    log_probs, entropies = [empty] * sample_count, [empty] * sample_count
    for rows, results in zip(ranks, scored, strict=True):
        for row, (row_log_probs, row_entropies) in zip(rows, results, strict=True):
            before = np.concatenate(([0], np.cumsum(row.loss_mask)))  # [T+1] counted tokens before each position
            for k, sample in enumerate(row.sample_index):
                part = slice(before[row.cu_seqlens[k]], before[row.cu_seqlens[k + 1]])
                log_probs[sample], entropies[sample] = row_log_probs[part], row_entropies[part]
    return TokenScores(tuple(log_probs), tuple(entropies))


class WholePolicy:
    """The policy for programs without the training loop: all ranks call its methods, each with the whole batch."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy, self._mesh = policy, policy.mesh

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        """Return the scores of the batch's samples, on every rank; collective."""
        scored = self._mesh.from_rank_0(self._policy.score(self._mine(batch), temperature))
        return unpack_scores(batch.ranks, scored, batch.sample_count)

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        """Take an optimizer step on the whole batch; collective."""
        return self._policy.update(self._mine(batch), objective, batch.token_count)

    def _mine(self, batch: Batch) -> Sequence[MicroBatch]:
        rows, part = batch.ranks[self._mesh.data_rank], self._policy.parts[self._mesh.rank]
        if batch.samples[0].routed_experts is None or part is None:
            return rows
        return [replace(row, own_experts=part.cut(row)) for row in rows]


def export_hf(policy: MegatronPolicy, folder: Path) -> None:
    """Write the policy's weights as an HF folder on rank 0, with the other files of the source model; collective.

    With LoRA, the adapters are merged into these weights, and the subfolder ``adapter`` has the adapters alone.

    Raises:
        ExportError: on every rank, if the folder cannot be written (a full disk, for example). An older folder stays.
    """
    from or1_megatron.parallel.export import ExportError, HFWriter

    adapters = None if policy.adapters is None else policy.adapters.writer()
    writer = HFWriter(policy.hf_folder, folder) if policy.mesh.rank == 0 else None
    problem: ExportError | None = None
    shapes = file_shapes({name: shape for name, _, shape in policy.weights.metadata()})
    for name, tensor in joined(policy.weights, shapes):  # also after a failure: the other ranks send all tensors
        if writer is not None and problem is None:
            assert tensor is not None
            try:
                writer.add(name, tensor)
            except ExportError as error:
                problem = error
    if writer is not None and problem is None:
        try:
            writer.finish(adapters)
        except ExportError as error:
            problem = error
    raise_together(policy.mesh, problem)
