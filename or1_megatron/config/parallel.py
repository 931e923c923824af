"""The configuration section ``parallel``: how the policy is spread over trainer ranks (TP, PP, CP, EP, DP), offload."""

from __future__ import annotations

import itertools
from typing import Literal, Self

from pydantic import model_validator

from or1_megatron.config.base import Positive, Section


class ParallelConfig(Section):
    """How the policy is spread over trainer ranks. Data parallelism is ranks / (tensor * pipeline * context)."""

    ranks: Positive = 1
    """Number of trainer ranks in all. Unit: torchrun processes."""
    tensor: Positive = 1
    """Tensor parallelism: each weight is cut over this many ranks. Unit: ranks."""
    pipeline: Positive = 1
    """Pipeline parallelism: the layers are cut into this many stages, one per rank. Unit: pipeline stages."""
    virtual_pipeline: Positive = 1
    """Model chunks per pipeline stage (interleaved 1F1B schedule). Unit: chunks."""
    layers_per_stage: tuple[Positive, ...] | None = None
    """Number of decoder layers of each of the pipeline * virtual_pipeline chunks, in the model's order. Set it to give
    fewer layers to the first and last stages, which also hold embedding and head. Unset: equally many. Unit: layers."""
    context: Positive = 1
    """Context parallelism: every sequence is cut zig-zag over this many ranks. Unit: ranks."""
    expert: Positive = 1
    """Expert parallelism: each layer's experts are spread over this many of the context- and data-parallel ranks. Unit:
    ranks."""
    sequence: bool = False
    """Sequence parallelism within the tensor-parallel group."""
    distributed_optimizer: bool = True
    """Spread the optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass. selective: those of the MLPs, which take most memory;
    full: those of whole layers."""
    head: Literal["recompute", "one_pass"] = "recompute"
    """How the fused head (log-probs without all logits in memory) gets its gradient. recompute: from logits that
    the backward pass computes again, which takes less memory; one_pass: in the forward pass, which takes three matrix
    products instead of four."""
    layers: Literal["auto", "own", "transformer_engine"] = "auto"
    """Implementation of linear layers, norms and attention. own: ours; auto: Transformer Engine's for bfloat16 on a GPU
    if it can be imported, else ours."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the last micro-batch's backward pass still runs."""
    grad_bucket_size: Positive | None = None
    """Size of a bucket, whose gradients are reduced together. Needs overlap_grad_reduce. Unset: Megatron's rule, the
    larger of 40 million and (1 million times the number of data-parallel ranks). Unit: parameters."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Move optimizer state to host memory and free gradients before engines wake; move parameters after the handoff.
    auto: only if engines use the trainer's GPUs (placement colocated)."""
    micro_batch_tokens: Positive = 8192
    """Token budget of one packed row of a micro-batch. A value below the longest prompt + response is refused. With 1.5
    times the longest prompt + response, or more, padding is below 1%."""
    threads_per_rank: Positive | None = None
    """Torch threads per rank, used only on CPU. Unset: the cores divided by the ranks. Unit: threads."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        model_parallel = self.tensor * self.pipeline * self.context
        if self.ranks % model_parallel:
            raise ValueError(
                f"parallel: ranks = {self.ranks} is not a multiple of tensor * pipeline * context = "
                f"{self.tensor} * {self.pipeline} * {self.context} = {model_parallel}"
            )
        if (self.context * self.data) % self.expert:
            raise ValueError(
                f"parallel: expert = {self.expert} does not divide context * data parallelism = {self.context} * "
                f"{self.data}; experts are spread over these ranks"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel: sequence needs tensor > 1 (sequence parallelism splits within the TP group)")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel: virtual_pipeline = {self.virtual_pipeline} needs pipeline > 1 (it interleaves stages)"
            )
        if self.grad_bucket_size is not None and not self.overlap_grad_reduce:
            raise ValueError("parallel: grad_bucket_size needs overlap_grad_reduce: there is one bucket without it")
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.chunks:
            raise ValueError(
                f"parallel: layers_per_stage has {len(self.layers_per_stage)} numbers; expected one for each of the "
                f"pipeline * virtual_pipeline = {self.pipeline} * {self.virtual_pipeline} = {self.chunks} chunks"
            )
        return self

    @property
    def chunks(self) -> int:
        """Number of chunks into which the pipeline cuts the model: PP * VPP."""
        return self.pipeline * self.virtual_pipeline

    def chunk_layers(self, layers: int) -> tuple[range, ...]:
        """Return the decoder layers of each chunk, in the model's order; chunk i lies on pipeline stage i % PP.

        Raises:
            ValueError: a model of ``layers`` layers cannot be cut into these chunks.
        """
        sizes = self.layers_per_stage
        if sizes is None:
            if layers % self.chunks:
                raise ValueError(
                    f"parallel.pipeline * virtual_pipeline = {self.pipeline} * {self.virtual_pipeline} = {self.chunks} "
                    f"does not divide the model's num_hidden_layers = {layers}; choose another, or say in "
                    "parallel.layers_per_stage how many layers each chunk has"
                )
            sizes = (layers // self.chunks,) * self.chunks
        if sum(sizes) != layers:
            raise ValueError(
                f"parallel.layers_per_stage = {list(sizes)} holds {sum(sizes)} layers; the model's num_hidden_layers "
                f"is {layers}"
            )
        ends = list(itertools.accumulate(sizes))
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    def stage_layers(self, layers: int) -> list[list[int]]:
        """Return the decoder layers of each pipeline stage (see ``chunk_layers``)."""
        chunks = self.chunk_layers(layers)
        return [[n for chunk in chunks[stage :: self.pipeline] for n in chunk] for stage in range(self.pipeline)]

    @property
    def optimizer_ranks(self) -> int:
        """Number of ranks that share the optimizer state of one weight (for an expert's weight there are fewer)."""
        return self.data * self.context if self.distributed_optimizer else 1

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline * self.context)
