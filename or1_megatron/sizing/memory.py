"""What one trainer rank holds in device memory: an estimate from shapes, so that a layout is refused on paper.

State is exact but for biases (below 0.1%). Activations are what the layers keep for their backward pass, summed over
the micro-batches that a pipeline stage has in flight, with one layer's own on top; allocator fragments, CUDA contexts
and communication buffers are not in it (``RESERVE_BYTES`` stands for them). Not compared with a GPU yet.
"""

from __future__ import annotations

from typing import Final

from or1_megatron.config.schema import Config
from or1_megatron.weights.shape import BYTES, Shape

RESERVE_BYTES: Final = 8 << 30
"""Left for CUDA contexts, NCCL, workspaces and fragments."""


def state_bytes(config: Config, shape: Shape) -> int:
    """Weights, fp32 gradients, fp32 master weights (bf16 only) and two fp32 moments, the latter three cut by DP; and a
    reference's weights, which are there while they are needed."""
    parallel = config.parallel
    model_parallel = parallel.tensor * parallel.pipeline
    own = BYTES[config.model.dtype] * (1 if config.algorithm.kl.reference is None else 2) + 4
    optimizer = 8 + (4 if config.model.dtype == "bfloat16" else 0)
    replicas = parallel.data * parallel.context
    total = 0
    for parameters, spread in (
        (shape.parameters - shape.expert_parameters, 1),
        (shape.expert_parameters, parallel.expert),
    ):
        weights = -(-parameters // (model_parallel * spread))
        total += weights * own
        total += -(-weights * optimizer // (replicas // spread if parallel.distributed_optimizer else 1))
    return total


def activation_bytes(config: Config, shape: Shape) -> int:
    """What a rank of the first pipeline stage keeps for the backward pass at rows of ``micro_batch_tokens`` tokens.

    Per token and layer, in numbers: none keeps the residual stream twice and both norms' outputs, queries, keys,
    values, attention's output, and three of the MLP's width; selective computes the MLP's again; full keeps the
    layer's input.
    The layer at work has all of its own, and as much again in gradients.
    """
    parallel = config.parallel
    hidden = shape.hidden / (parallel.tensor if parallel.sequence else 1)
    attention = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads) / parallel.tensor
    experts = shape.experts
    width = shape.intermediate if experts is None else experts.chosen * experts.intermediate + (experts.shared or 0)
    mlp = 3 * width / parallel.tensor
    whole = 4 * hidden + attention + mlp
    kept = {"none": whole, "selective": whole - mlp, "full": hidden}[parallel.recompute]
    tokens = parallel.micro_batch_tokens / parallel.context
    in_flight = parallel.pipeline
    layers = max(len(chunk) for chunk in parallel.chunk_layers(shape.layers)) * parallel.virtual_pipeline
    return int(BYTES[config.model.dtype] * tokens * (kept * layers * in_flight + 2 * whole))
