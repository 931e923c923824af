"""Ways to end vLLM's layerwise reload."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


def pack_experts_anew() -> None:
    """On CPU, make vLLM pack a layer's experts each time they are loaded: of itself it does so only the first time, and
    would compute with experts in another order of numbers after a handoff (vLLM 0.32)."""
    if not current_platform.is_cpu():
        return
    process = UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_anew(self: Any, layer: Any) -> None:
        self.moe_kernel = None
        process(self, layer)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_anew


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Complete a layerwise reload, tied layers included.

    A layer that shares another one's weight (a tied output layer) is not loaded itself, so vLLM does not process it
    again. On CPU it computes with a copy packed for oneDNN when the model was built. This copy is renewed here.
    """
    finalize_layerwise_reload(model, model_config)
    seen: set[int] = set()
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.nn.Parameter):
            continue
        if id(weight) in seen and hasattr(layer, "cpu_linear"):
            del layer.cpu_linear  # first, so that there are never two copies
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]  # vLLM's
        seen.add(id(weight))


def put_back(model: torch.nn.Module, model_config: Any) -> None:
    """Break off a layerwise reload: layers not yet loaded get their tensors back."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel, info.load_numel_total = 0, 0
    finalize_layerwise_reload(model, model_config)
