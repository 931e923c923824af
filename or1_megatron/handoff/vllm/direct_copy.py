"""Copies received slices straight into an engine's parameters, without running vLLM's weight loaders again.

The trace of the loaders (``vllm.loader_trace``) shows that most loaders only copy rectangles of tensors to rectangles
of parameters. A layer is filled by direct copies if the copies write each element of the layer's parameters exactly
once. All other layers are loaded by their loaders.

Layers that compute with their parameters in the form in which these are loaded (norms, embeddings) are filled in
place. Any other layer is filled outside the model. vLLM then processes the layer (on CPU, for instance, vLLM packs the
weights for oneDNN) and copies the result to the tensors with which the layer computes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.platforms import current_platform

from or1_megatron.handoff.message.shipment import ReceivedSlice
from or1_megatron.handoff.message.slices import Slice
from or1_megatron.handoff.transport.base import BufferPool
from or1_megatron.handoff.vllm.loader_trace import LoaderTrace, ParameterView, source_box_of
from or1_megatron.handoff.vllm.parameter_check import targets
from or1_megatron.weights.holdings import Box, box_size, intersection

# Methods of layers that load by copying. Quantised ones may count what was loaded, or compute.
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
_KEEPS = "UnquantizedEmbeddingMethod"  # this method at most packs a copy of the weight


def copied_directly(model: torch.nn.Module, trace: LoaderTrace) -> frozenset[str]:
    """Return the names of the tensors that need no loader: for each layer, either all of its tensors or none."""
    inside: dict[str, set[str]] = defaultdict(set)  # layer to tensors
    around: dict[str, set[str]] = defaultdict(set)  # tensor to layers
    filled: dict[str, dict[str, list[ParameterView]]] = defaultdict(lambda: defaultdict(list))  # by layer, parameter
    for (name, _), destinations in trace.destinations.items():
        for target in destinations:
            inside[target.module].add(name)
            around[name].add(target.module)
            filled[target.module][target.parameter].append(target)
    names = {
        name
        for name, views in trace.sources.items()
        if name not in trace.whole
        and name not in trace.copied_elsewhere
        and all((name, view) in trace.destinations for view in views)
        and _disjoint([source.box for source in views.values()])
    }
    modules = dict(model.named_modules())
    layers = {path for path in inside if _plain(modules[path]) and _is_filled(path, trace, filled[path])}
    while True:
        kept = {path for path in layers if inside[path] <= names}
        left = {name for name in names if around[name] <= kept}
        if (kept, left) == (layers, names):
            return frozenset(names)
        layers, names = kept, left


def _plain(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    # vLLM processes attention layers' own tensors (scales) last, in a way of their own.
    return not is_deferred_attention_layer(layer) and (method is None or type(method).__name__ in _PLAIN)


def _is_filled(path: str, trace: LoaderTrace, filled: Mapping[str, Sequence[ParameterView]]) -> bool:
    """Return whether the traced copies write, each exactly once, all elements that vLLM's reload of the layer needs."""
    total = 0
    for parameter, views in filled.items():
        written = [source_box_of(target.shape, target.view) for target in views]
        boxes = [source.box for source in written if source is not None]
        if len(boxes) < len(written) or (path, parameter) in trace.written_otherwise or not _disjoint(boxes):
            return False
        total += sum(map(box_size, boxes))
    return total == trace.elements[path]


def _disjoint(boxes: Iterable[Box]) -> bool:
    return all(intersection(one, other) is None for one, other in combinations(boxes, 2))


class DirectCopy:
    """Copies received slices into one engine rank's parameters, during vLLM's layerwise reload in each handoff."""

    def __init__(self, model: torch.nn.Module, trace: LoaderTrace, slices: Iterable[Slice]) -> None:
        """``slices``: all slices that this engine rank receives in a handoff."""
        self._modules = dict(model.named_modules())
        self.names = copied_directly(model, trace)
        self._targets = {part: [*targets(part, trace)] for part in slices if part.name in self.names}
        self._expected = Counter(target.module for parts in self._targets.values() for target in parts)
        self._missing: dict[str, int] = {}
        self._in_place = set[str]()
        # Memory that is touched for the first time costs more than the copy.
        self._scratch = BufferPool(lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8))
        self._borrowed: dict[str, Tensor] = {}  # by layer

    def begin(self) -> None:
        """Begin a handoff. Call this after vLLM's ``initialize_layerwise_reload``."""
        self._missing = dict(self._expected)  # slices by layer
        self._in_place.clear()
        self._borrowed.clear()
        self._scratch.clear()

    def copy(self, received: ReceivedSlice) -> None:
        """Verify a slice, and copy it into the parameters that its loader would fill."""
        received.verify()
        values = received.flat
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are a subclass
            for target in self._targets[received.slice]:
                layer = self._modules[target.module]
                missing = self._missing[target.module]
                if missing == self._expected[target.module]:
                    self._open(target.module)
                parameter = layer._parameters[target.parameter]
                assert parameter is not None
                region = target.of(parameter.data)
                region.copy_(values.view(region.shape))
                self._missing[target.module] = missing - 1
                if missing == 1:
                    self._close(target.module)

    def _open(self, path: str) -> None:
        layer = self._modules[path]
        info = get_layerwise_info(layer)
        if _keeps_parameters(layer):
            self._in_place.add(path)
            _place_kernel_tensors(layer, info)
            return
        materialize_layer(layer, info)
        if _only_packed(layer):
            weight = layer._parameters["weight"]
            assert weight is not None
            size = weight.numel() * weight.itemsize
            self._borrowed[path] = buffer = self._scratch.take(size)
            weight.data = buffer[:size].view(weight.dtype).view(weight.shape)

    def _close(self, path: str) -> None:
        """Make the layer ``path`` compute with its new parameters, after all of its slices are copied."""
        layer = self._modules[path]
        info = get_layerwise_info(layer)
        if path not in self._in_place:
            _layerwise_process(layer, info)
            if path in self._borrowed:
                self._scratch.give(self._borrowed.pop(path))
            return
        method: Any = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
        info.reset()

    def check_complete(self) -> None:
        """End a handoff. Raises RuntimeError if a layer has not been given all of its slices."""
        self._scratch.clear()
        for path, missing in self._missing.items():
            if missing:
                raise RuntimeError(f"'{path}' of the engine's model lacks {missing} of {self._expected[path]} slices")


def _keeps_parameters(layer: torch.nn.Module) -> bool:
    """Return whether a layer in reload computes with tensors of the same shapes and dtypes as the loaded tensors."""
    method, kernel = getattr(layer, "quant_method", None), get_layerwise_info(layer).kernel_tensors
    if kernel is None or kernel[1] or (method is not None and type(method).__name__ != _KEEPS):
        return False
    loaded = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
    return loaded.keys() == kernel[0].keys() and all(
        parameter.is_meta
        and (parameter.shape, parameter.stride(), parameter.dtype) == (held.shape, held.stride(), held.dtype)
        for parameter, held in ((parameter, kernel[0][name]) for name, parameter in loaded.items())
    )


def _only_packed(layer: torch.nn.Module) -> bool:
    """Return whether vLLM (on CPU) keeps only a oneDNN copy of a layer's weight. The layer must be in reload."""
    kernel = get_layerwise_info(layer).kernel_tensors
    held = None if kernel is None else kernel[0].get("weight")
    on_cpu = current_platform.is_cpu() and not current_platform.is_zen_cpu()  # Zen may keep the loaded tensor
    return on_cpu and held is not None and not held.numel()
