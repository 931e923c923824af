"""Received slices, copied straight to where a model's loaders were seen to put them.

Once recorded (``recording``), most loaders need not run again: they copy rectangles of tensors to rectangles of
parameters, and both are known. A layer is placed so when all that its parameters hold comes from such copies, each
element once; any other is loaded by its loaders. What follows a layer's loading is vLLM's own either way: processing
(packing, for instance), and the copy into the tensors that it computes with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from or1_megatron.handoff.message.buckets import Slice
from or1_megatron.handoff.message.message import ReceivedSlice
from or1_megatron.handoff.vllm.loader_trace import LoaderTrace, ParameterView, View, offset_in, source_box_of
from or1_megatron.weights.holdings import Box, box_size, intersection

# Of layers with a method, those whose loading is copying. Quantised ones may keep count of what was loaded, or compute.
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """A part of a parameter that takes up a slice."""

    module: str
    parameter: str
    view: View


def copied_directly(model: torch.nn.Module, trace: LoaderTrace) -> frozenset[str]:
    """Names of the tensors that need no loader. All that a layer takes up is among them, or nothing of it."""
    inside: dict[str, set[str]] = defaultdict(set)  # layer to tensors
    around: dict[str, set[str]] = defaultdict(set)  # tensor to layers
    filled: dict[tuple[str, str], list[ParameterView]] = defaultdict(list)
    for (name, _), destinations in trace.destinations.items():
        for place in destinations:
            inside[place.module].add(name)
            around[name].add(place.module)
            filled[place.module, place.parameter].append(place)
    names = {
        name
        for name, views in trace.sources.items()
        if name not in trace.whole
        and name not in trace.copied_elsewhere
        and all((name, view) in trace.destinations for view in views)
        and _disjoint([source_box.box for source_box in views.values()])
    }
    modules = dict(model.named_modules())
    layers = {path for path in inside if _plain(modules[path]) and _is_filled(path, trace, filled)}
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


def _is_filled(path: str, trace: LoaderTrace, filled: dict[tuple[str, str], list[ParameterView]]) -> bool:
    """Whether the recorded copies alone write each element of all that vLLM waits for in this layer, once."""
    total = 0
    for (module, parameter), destinations in filled.items():
        if module != path:
            continue
        boxes: list[Box] = []
        for place in destinations:
            source_box = source_box_of(place.shape, place.view)
            if source_box is None:
                return False
            boxes.append(source_box.box)
        if (path, parameter) in trace.written_otherwise or not _disjoint(boxes):
            return False
        total += sum(map(box_size, boxes))
    return total == trace.elements[path]


def _disjoint(boxes: Iterable[Box]) -> bool:
    return all(intersection(one, other) is None for one, other in combinations(boxes, 2))


class DirectCopy:
    """Of one engine rank, for one handoff after another. Between them vLLM's layerwise reload begins and ends."""

    def __init__(self, model: torch.nn.Module, trace: LoaderTrace, cuts: Iterable[Slice]) -> None:
        """``cuts``: all slices that this rank receives in a handoff."""
        self._modules = dict(model.named_modules())
        self.names = copied_directly(model, trace)
        self.targets: dict[Slice, list[CopyTarget]] = {}
        self._expected: dict[str, int] = defaultdict(int)  # slices by layer
        for cut in cuts:
            if cut.name in self.names:
                self.targets[cut] = [*_targets(cut, trace)]
                for target in self.targets[cut]:
                    self._expected[target.module] += 1
        self._missing: dict[str, int] = {}

    def begin(self) -> None:
        """Of a handoff, after vLLM's ``initialize_layerwise_reload``."""
        self._missing = dict(self._expected)

    def put(self, received: ReceivedSlice) -> None:
        """Copy a slice to its place, once it has been found to be what was sent."""
        received.verify()
        values = received.flat
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters are a subclass
            for target in self.targets[received.cut]:
                layer = self._modules[target.module]
                missing = self._missing[target.module]
                if missing == self._expected[target.module]:
                    materialize_layer(layer, get_layerwise_info(layer))
                parameter = layer._parameters[target.parameter]
                assert parameter is not None
                offset, size, stride = target.view
                place = parameter.data.as_strided(size, stride, parameter.storage_offset() + offset)
                place.copy_(values.view(size))
                self._missing[target.module] = missing - 1
                if missing == 1:
                    _layerwise_process(layer, get_layerwise_info(layer))

    def check_complete(self) -> None:
        """Raises RuntimeError when a layer has not been given all of its slices."""
        for path, missing in self._missing.items():
            if missing:
                raise RuntimeError(f"'{path}' of the engine's model lacks {missing} of {self._expected[path]} slices")


def _targets(cut: Slice, trace: LoaderTrace) -> Iterable[CopyTarget]:
    for view, source_box in trace.sources[cut.name].items():
        where = offset_in(cut.box, source_box)
        if where is None:
            continue
        for place in trace.destinations[cut.name, view]:
            yield CopyTarget(place.module, place.parameter, place.part(where))
