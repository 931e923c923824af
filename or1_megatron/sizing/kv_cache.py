"""How large an engine's KV cache may be where engine and trainer use the same GPU alternately.

vLLM fixes the size when it starts, on a GPU that holds nothing else. When the engine wakes again later, the GPU also
holds what the trainer cannot give back: its CUDA context, communication buffers and fragments. So the size is the GPU's
memory less weights, logits and a reserve for each of the two. The reserves are estimates, not yet compared with a GPU.
"""

from __future__ import annotations

from typing import Final

import torch

from or1_megatron.config.schema import Config
from or1_megatron.weights.shape import BYTES, Shape

TRAINER_RESERVE_BYTES: Final = 8 << 30
"""What an offloaded trainer keeps of its GPU: CUDA context, NCCL's buffers, cuBLAS's workspaces, fragments."""
ENGINE_RESERVE_BYTES: Final = 6 << 30
"""What an engine holds beside weights and KV cache: CUDA context, CUDA graphs, NCCL's buffers, a step's activations."""
_LOGITS_COPIES: Final = 3
"""fp32 copies of its responses' logits that vLLM's sampler has at once."""


def shared_kv_cache_bytes(config: Config, shape: Shape) -> int | None:
    """Return the bytes for KV cache on each GPU of an engine, at least 0; None where the rule does not apply.

    It applies to colocated engines of a trainer whose state leaves the GPU, if ``cluster.gpu_memory_gb`` is known.
    """
    rollout, parallel, gpu_gb = config.rollout, config.parallel, config.cluster.gpu_memory_gb
    if rollout.placement != "colocated" or parallel.offload == "never" or gpu_gb is None:
        return None
    number = BYTES[config.model.dtype]
    weights = -(-shape.parameters // rollout.tensor_parallel) * number
    logits = logits_bytes(config, shape)
    kept = ENGINE_RESERVE_BYTES + TRAINER_RESERVE_BYTES
    return max(0, int(gpu_gb * 1e9) - weights - logits - kept)


def with_gpu_memory(config: Config) -> Config:
    """Return the config with the memory of the GPUs here, if any, unless the config sets it."""
    if config.cluster.gpu_memory_gb is not None or not torch.cuda.is_available():
        return config
    there = torch.cuda.get_device_properties(0).total_memory / 1e9
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu_memory_gb": there})})


def logits_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes of the logits that an engine's sampler holds on a GPU."""
    return _LOGITS_COPIES * 4 * config.rollout.max_concurrent * shape.vocab
