"""Chooses the size of a vLLM engine's KV cache if engine and trainer use the same GPU in turn (placement colocated).

vLLM fixes the size when it starts, on a GPU that holds nothing else. When the engine wakes later, the GPU also holds
the trainer's CUDA context, communication buffers and fragments, which the trainer cannot free. So the size is the GPU's
memory minus the weights, the logits and two reserves, one for the engine and one for the trainer. Both reserves are
estimates, not checked on a GPU.
"""

from __future__ import annotations

from typing import Final

import torch

from or1_megatron.config.schema import Config
from or1_megatron.weights.shape import BYTES, Shape

TRAINER_RESERVE_BYTES: Final = 8 << 30
"""GPU memory that an offloaded trainer keeps: CUDA context, NCCL's buffers, cuBLAS's workspaces, fragments."""
ENGINE_RESERVE_BYTES: Final = 6 << 30
"""GPU memory that an engine needs for CUDA context, CUDA graphs, NCCL's buffers and activations."""
_LOGITS_COPIES: Final = 3
"""Number of fp32 copies of the logits of all running responses that vLLM's sampler holds at once."""


def shared_kv_cache_bytes(config: Config, shape: Shape) -> int | None:
    """Return the bytes of the KV cache on each GPU of an engine that shares its GPUs with an offloading trainer.

    Return None if engines are not colocated, the trainer never offloads or ``cluster.gpu_memory_gb`` is unknown.
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
    """Return the config. An unset ``cluster.gpu_memory_gb`` is set from this machine's GPU, if there is a GPU."""
    if config.cluster.gpu_memory_gb is not None or not torch.cuda.is_available():
        return config
    there = torch.cuda.get_device_properties(0).total_memory / 1e9
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu_memory_gb": there})})


def logits_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes of the logits that a vLLM engine's sampler holds on a GPU."""
    return _LOGITS_COPIES * 4 * config.rollout.max_concurrent * shape.vocab
