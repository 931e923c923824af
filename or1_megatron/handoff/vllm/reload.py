"""Begins vLLM's layerwise weight reload, and completes or cancels it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


def begin_reload(model: torch.nn.Module) -> None:
    """Begin a layerwise reload.

    On CPU, vLLM 0.32 packs the experts' weights only when it makes the experts' kernel. With an old kernel, new weights
    would stay unpacked. So this function drops the kernels, and vLLM makes new ones.
    """
    for layer in model.modules() if current_platform.is_cpu() else ():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
    initialize_layerwise_reload(model)


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Complete a layerwise reload, also of tied layers.

    A layer that shares another layer's weight (a tied output layer) is not loaded itself, so vLLM does not process it
    again. On CPU such a layer computes with its own oneDNN copy of the weight. This function renews the copy.
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
    """Cancel a layerwise reload. Layers that are not yet loaded get their tensors back."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel, info.load_numel_total = 0, 0
    finalize_layerwise_reload(model, model_config)
