"""Records in vLLM's workers which experts computed each token, for router replay.

A token's expert ids are stored at the index of the cache slot that holds the token's keys and values. So requests with
the same prefix share the ids, a preempted request's ids are written again, and a rejected drafted token leaves no ids.
After a handoff, all tokens of unfinished responses are computed again and get the ids that the new weights choose.
vLLM's own record of routed experts needs vLLM's V2 model runner, which does not run on CPU.

vLLM imports this module in every worker, before the model is made, if ``RoutingExtension`` is the engine's extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from or1_megatron.rollout.worker import WorkerExtension
from or1_megatron.types import RoutedExperts

_WHOLE: Final = (KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION, KVCacheSpecKind.SINK_FULL_ATTENTION)
"""Kinds of caches that keep every token until its request ends."""


class RoutingCache:
    """Holds the k expert ids of each cached token in each of L layers: [slots + 1, L, k] on the worker's device.

    vLLM's routers call ``capture``, also within CUDA graphs, so ``capture`` uses only tensors with fixed addresses.
    """

    def __init__(self, runner: Any) -> None:
        """``runner``: vLLM's model runner, with its model and KV cache.

        Raises:
            ValueError: vLLM cannot say which experts the model's tokens go to, or no cache keeps all tokens.
        """
        groups = runner.kv_cache_config.kv_cache_groups
        kinds = [get_kv_cache_spec_kind(group.kv_cache_spec) for group in groups]
        try:
            self._group = next(index for index, kind in enumerate(kinds) if kind in _WHOLE)
            bind_routed_experts_capturer(runner.model, self)  # which calls ``capture`` alone
        except (StopIteration, ValueError) as error:
            raise ValueError(
                "rollout.router_replay = true, but this engine cannot return the experts of its tokens: "
                f"{error or 'no KV cache of this model keeps all tokens'}"
            ) from error
        routers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        self._place = {layer: place for place, layer in enumerate(sorted(module.layer_id for module in routers))}
        self._runner, self._table = runner, runner.input_batch.block_table[self._group]
        self._block_tokens = groups[self._group].kv_cache_spec.block_size
        size = len(self._place), runner.model_config.get_num_experts_per_tok()
        dtype = torch.uint8 if runner.model_config.get_num_experts() <= 256 else torch.int16
        # The last row takes what a batch is padded with, whose slot is -1.
        slots = runner.kv_cache_config.num_blocks * self._block_tokens + 1
        self._held = torch.zeros(slots, *size, dtype=dtype, device=runner.device)

    def capture(self, layer: int, chosen: Tensor) -> None:
        """Store ``chosen`` [B, k]: the ids of the experts that the router of ``layer`` chose for the batch's tokens."""
        slots = self._table.slot_mapping.gpu[: len(chosen)]
        self._held[slots, self._place[layer]] = chosen.to(self._held.dtype)

    def read(self, name: str, tokens: int) -> RoutedExperts:
        """Return the expert ids [tokens, L, k] of a request's first ``tokens`` tokens, even if it just ended."""
        blocks = torch.tensor(self._runner.requests[name].block_ids[self._group])
        slots = (blocks[:, None] * self._block_tokens + torch.arange(self._block_tokens)).flatten()[:tokens]
        found: RoutedExperts = self._held[slots.to(self._held.device)].cpu().numpy()
        return found if found.dtype == np.uint8 else found.view(np.uint16)


class RoutingExtension(WorkerExtension):
    """Extends vLLM's workers with a method that returns the recorded expert ids."""

    rank: int  # vLLM's, of the worker

    def routed_experts(self, requests: Sequence[tuple[str, int]]) -> list[RoutedExperts] | None:
        """Return ``RoutingCache.read`` for each (name, tokens) on the engine's first rank, and None on other ranks."""
        cache: RoutingCache = self.model_runner.routing_cache
        return [cache.read(*request) for request in requests] if self.rank == 0 else None


_initialize = GPUModelRunner.initialize_kv_cache  # the CPU's runner calls it, too


def _with_routing_cache(self: Any, config: Any, is_profiling: bool = False, **options: Any) -> None:
    """Make a runner's ``routing_cache`` when its KV cache has been made, before CUDA graphs are captured."""
    _initialize(self, config, is_profiling, **options)
    if not is_profiling:
        self.routing_cache = RoutingCache(self)


GPUModelRunner.initialize_kv_cache = _with_routing_cache
