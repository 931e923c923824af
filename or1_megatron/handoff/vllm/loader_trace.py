"""Traces which slices of HF tensors a vLLM model's weight loaders copy, and gives the loaders only these slices.

``trace_loaders`` runs the loaders once on placeholders: tensors of the full HF shape on the meta device, which have no
memory. torch keeps the geometry of each view that a loader takes of a placeholder (narrow, chunk, index), and a
dispatch mode sees when the loader copies a view into a parameter. So no table of fused projections, tensor
parallelism, tied embeddings or experts is needed.

At a weight update most layers need no loader (``direct_copy``). The loaders of all other layers run again on
placeholders, through vLLM's layerwise reload. Whenever a loader copies a placeholder, ``SliceLoader`` copies the
received slices instead. A loader that does more with a tensor than copy a part of it gets the whole tensor.

Loaders of gpt-oss get one entry [in, n * out] per expert (``weights.stacked_experts``). It holds n tensors, called its
parts: it is the transpose of a contiguous tensor, whose row i belongs to part i modulo n. When a loader copies rows,
this counts as one copy of each part.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_layer_size

from or1_megatron.handoff.message.shipment import ReceivedSlice
from or1_megatron.handoff.message.slices import Slice, whole_tensor
from or1_megatron.handoff.vllm.reload import put_back
from or1_megatron.weights.holdings import Box
from or1_megatron.weights.stacked_experts import loaded_as, part_of

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(storage offset, size, stride) of a view of a placeholder or parameter."""


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A rectangle of an HF tensor that a loader copies."""

    box: Box
    axes: tuple[int, ...]
    """For each axis of the copied view, the HF tensor's axis that it corresponds to; -1 for an axis of size 1."""


@dataclass(frozen=True, slots=True)
class ParameterView:
    """A part of a model's parameter."""

    module: str
    parameter: str
    view: View
    shape: tuple[int, ...]
    """The whole parameter's shape while the loaders run; vLLM's processing may change it afterwards."""

    def part(self, where: tuple[slice, ...]) -> ParameterView:
        """Return the rectangle ``where`` of this part."""
        offset, size, stride = self.view
        view = view_of(torch.empty(self.shape, device="meta").as_strided(size, stride, offset)[where])
        return replace(self, view=view)

    def of(self, parameter: Tensor) -> Tensor:
        """Return this part of ``parameter``, as a view."""
        offset, size, stride = self.view
        return parameter.as_strided(size, stride, parameter.storage_offset() + offset)


@dataclass
class LoaderTrace:
    """The parts of tensors that the loaders of one engine rank copy, and the parameters that receive the copies."""

    tensors: dict[str, Slice]
    """All tensors of the model, whole, by name."""
    offered: dict[str, Slice] = field(default_factory=dict)
    """What loaders get: all tensors, except that an expert's entry replaces the tensors that are its ``parts``."""
    parts: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, dict[View, SourceBox]] = field(default_factory=dict)
    """By tensor and view, the rectangles that loaders copy. Tensors that no loader copies are absent."""
    whole: dict[str, str] = field(default_factory=dict)
    """Tensors that the rank must receive whole, each with the reason."""
    destinations: dict[tuple[str, View], list[ParameterView]] = field(default_factory=dict)
    """By tensor and view, the parts of parameters to which the view is copied."""
    copied_elsewhere: set[str] = field(default_factory=set)
    """Tensors that are also copied to a tensor that is no parameter."""
    written_otherwise: set[tuple[str, str]] = field(default_factory=set)
    """(module, parameter) of each parameter that is also written by operations other than copies, such as padding."""
    elements: dict[str, int] = field(default_factory=dict)
    """By module, the number of elements for which vLLM's layerwise reload waits."""

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            self.offered[entry := loaded_as(name)] = tensor
            if part := part_of(name):
                self.parts.setdefault(entry, []).append(name)
                self.offered[entry] = whole_tensor(
                    entry, tensor.dtype, (*tensor.shape[1:], part.step * tensor.shape[0])
                )

    def wants(self) -> list[Slice]:
        """Return the slices that this rank needs."""
        wanted = []
        for name, tensor in self.tensors.items():
            if name in self.whole:
                wanted.append(tensor)
            else:
                wanted += [Slice(name, source.box, tensor.dtype) for source in self.sources.get(name, {}).values()]
        return wanted


def source_box_of(shape: tuple[int, ...], view: View) -> SourceBox | None:
    """Return the rectangle of a contiguous tensor that ``view`` shows; None when the view is no rectangle."""
    offset, size, stride = view
    full = torch.empty(shape, device="meta").stride()
    start = []
    for step in full:
        start.append(offset // step if step else 0)
        offset -= start[-1] * step
    box = [(low, low + 1) for low in start]
    axes: list[int] = []
    axis = 0
    for extent, step in zip(size, stride, strict=True):
        if extent == 1:
            axes.append(-1)
            continue
        while axis < len(shape) and (full[axis] != step or shape[axis] == 1):
            axis += 1
        if axis == len(shape) or start[axis] + extent > shape[axis]:
            return None
        box[axis] = (start[axis], start[axis] + extent)
        axes.append(axis)
        axis += 1
    return SourceBox(tuple(box), tuple(axes))


def view_of(tensor: Tensor) -> View:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


class _Placeholders(TorchDispatchMode):
    """A dispatch mode that makes placeholders, recognises them by their storage, and sees the operations on them."""

    def __init__(self, trace: LoaderTrace) -> None:
        super().__init__()
        self.trace = trace
        self._names: dict[int, tuple[str, StorageWeakRef]] = {}

    def placeholder(self, tensor: Slice) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.name in self.trace.parts:
            made = made.t().contiguous().t()
        storage = made.untyped_storage()
        self._names[storage._cdata] = (tensor.name, StorageWeakRef(storage))
        return made

    def forget_dead(self) -> list[str]:
        """Forget the placeholders that no loader holds any longer, and return their names."""
        dead = [key for key, (_, storage) in self._names.items() if storage.expired()]
        return [self._names.pop(key)[0] for key in dead]

    def _name(self, value: Any) -> str | None:
        if isinstance(value, Tensor) and value.is_meta:
            known = self._names.get(value.untyped_storage()._cdata)
            return known[0] if known else None
        return None

    def copied(self, destination: Tensor, name: str, source: Tensor) -> None:
        raise NotImplementedError

    def by_part(self, destination: Tensor, name: str, source: Tensor) -> Iterator[tuple[Tensor, str, View]]:
        """Yield (destination, name, view) for each part of a copied entry, or once for a tensor without parts."""
        if (names := self.trace.parts.get(name)) is None:
            yield destination, name, view_of(source)
            return
        width, step = math.prod(self.trace.offered[name].shape[:-1]), len(names)
        if source.stride(0) != width:
            self.transformed(name, "a copy of other rows")
        for taken in (slice(row, None, step) for row in range(step)):
            offset, size, stride = view_of(source[taken])
            row = offset // width
            view = (row // step * width + offset % width, size, (width, *stride[1:]))
            yield destination[taken], names[row % step], view

    def transformed(self, name: str, operation: str) -> None:
        raise NotImplementedError

    def called(self, func: Any, args: Sequence[Any]) -> None:
        """Take note of an operation other than a copy from a placeholder."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._name(args[1])) is not None:
            self.copied(args[0], name, args[1])
            return args[0]
        if func is torch.ops.aten.clone.default and self._name(args[0]) in self.trace.parts:
            return args[0]  # made contiguous only to be copied
        self.called(func, args)
        name = next((known for arg in args if (known := self._name(arg)) is not None), None)
        result = func(*args, **(kwargs or {}))
        if name is not None:
            results = result if isinstance(result, tuple | list) else (result,)
            if any(isinstance(made, Tensor) and self._name(made) != name for made in results):
                self.transformed(name, str(func))
        return result


class _TracingMode(_Placeholders):
    """Records in a ``LoaderTrace`` the copies of placeholders and other writes to a model's parameters."""

    def __init__(self, tensors: Sequence[Slice], model: torch.nn.Module) -> None:
        """``model``: a model whose layerwise reload has begun."""
        super().__init__(LoaderTrace({tensor.name: tensor for tensor in tensors}))
        self._parameters: dict[int, tuple[str, str, tuple[int, ...]]] = {}  # by storage
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                storage = parameter.untyped_storage()._cdata
                self._parameters.setdefault(storage, (path, name, tuple(parameter.shape)))
            self.trace.elements[path] = get_layer_size(module)

    def copied(self, destination: Tensor, name: str, source: Tensor) -> None:
        for target, part, view in self.by_part(destination, name, source):
            source_box = source_box_of(self.trace.tensors[part].shape, view)
            if source_box is None:
                self.transformed(name, f"a view of size and stride {view[1:]}")
            elif destination.shape != source.shape:
                self.transformed(name, "a broadcast")
            else:
                self.trace.sources.setdefault(part, {})[view] = source_box
                self._note_destination(part, view, target)

    def _note_destination(self, name: str, view: View, destination: Tensor) -> None:
        known = self._parameters.get(destination.untyped_storage()._cdata)
        if known is None:
            self.trace.copied_elsewhere.add(name)
        else:
            target = ParameterView(known[0], known[1], view_of(destination), known[2])
            destinations = self.trace.destinations.setdefault((name, view), [])
            if target not in destinations:
                destinations.append(target)

    def transformed(self, name: str, operation: str) -> None:
        for part in self.trace.parts.get(name, [name]):
            self.trace.whole.setdefault(part, f"its loader computes {operation} of it")

    def called(self, func: Any, args: Sequence[Any]) -> None:
        if func._schema.is_mutable:
            for value in args:
                if not isinstance(value, Tensor) or not value.numel():
                    continue
                if (known := self._parameters.get(value.untyped_storage()._cdata)) is not None:
                    self.trace.written_otherwise.add(known[:2])


def trace_loaders(model: torch.nn.Module, model_config: Any, tensors: Sequence[Slice]) -> LoaderTrace:
    """Run the model's loaders once on placeholders of all ``tensors``, and return the trace. No weight changes."""
    initialize_layerwise_reload(model)
    for layer in model.modules():
        get_layerwise_info(layer).load_numel = -(1 << 62)  # no layer shall ever count as complete
    tracing = _TracingMode(tensors, model)
    left = list(tracing.trace.offered.values())
    try:
        while left:
            taken: list[Slice] = []

            def offered(queue: list[Slice] = left, taken: list[Slice] = taken) -> Iterator[tuple[str, Tensor]]:
                for tensor in queue:
                    taken.append(tensor)
                    yield tensor.name, tracing.placeholder(tensor)

            try:
                with tracing:
                    model.load_weights(offered())  # type: ignore[operator]  # every vLLM model has it
            except (NotImplementedError, RuntimeError, TypeError) as error:
                if not taken:
                    raise
                tracing.transformed(taken[-1].name, f"what fails on a placeholder ({error})")
            left = left[max(1, len(taken)) :]
    finally:
        put_back(model, model_config)
    return tracing.trace


class SliceLoader(_Placeholders):
    """Gives received slices to a model's loaders, as a dispatch mode around ``load_weights`` and the reload's end.

    Each weight update needs a new SliceLoader. A tensor's slices are dropped once vLLM no longer needs the tensor's
    placeholder. Slices are views into a message until ``load`` replaces them by copies.
    """

    def __init__(self, trace: LoaderTrace, expected: Iterable[Slice]) -> None:
        """``expected``: all slices that ``take`` will be given in this update."""
        super().__init__(trace)
        names = [part.name for part in expected]
        self._missing = Counter(map(loaded_as, names))
        self._received: dict[str, list[ReceivedSlice]] = defaultdict(list)
        self._complete: list[str] = []
        by_view = set(names) & trace.sources.keys() - trace.whole.keys()
        self._due = {(name, view) for name in by_view for view in trace.sources[name]}

    def take(self, received: ReceivedSlice) -> None:
        name = loaded_as(received.slice.name)
        self._received[name].append(received)
        self._missing[name] -= 1
        if not self._missing[name]:
            self._complete.append(name)

    def load(self, model: torch.nn.Module) -> None:
        """Load the tensors whose slices have all arrived, and copy slices that are still needed out of their messages.

        Call this before the memory of the messages is reused, but not for every message, because vLLM goes through all
        of its modules at each call.
        """
        if self._complete:
            with self:
                model.load_weights((name, self._stand_in(name)) for name in self._complete)  # type: ignore[operator]
            self._complete.clear()
        for name in self.forget_dead():
            for part in self._received.pop(name):
                part.verify()  # for a slice that nothing has copied
        for slices in self._received.values():
            for part in slices:
                part.keep()

    def _stand_in(self, name: str) -> Tensor:
        """Return the tensor that the loaders get: a placeholder, or the received tensor if they need all of it."""
        tensor, parts = self.trace.offered[name], self.trace.parts.get(name, [name])
        if parts[0] not in self.trace.whole:
            return self.placeholder(tensor)
        slices = self._received.pop(name)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=slices[0].message.device)
        for part in slices:
            part.verify()
            of_entry = part_of(part.slice.name)
            whole = of_entry.of(made) if of_entry else made
            whole[tuple(slice(*bounds) for bounds in part.slice.box)] = part.values
        return made

    def check_complete(self) -> None:
        """Raise RuntimeError if a slice was never copied into a parameter."""
        if self._due:
            name = sorted(self._due)[0][0]
            raise RuntimeError(f"'{name}' was received, but its loader never put it into the model")

    def copied(self, destination: Tensor, name: str, source: Tensor) -> None:
        if destination.is_meta:
            torch.ops.aten.copy_.default(destination, source)  # vLLM counts what is copied
            return
        for target, tensor, view in self.by_part(destination, name, source):
            source_box = self.trace.sources[tensor].get(view)
            if source_box is None:
                raise RuntimeError(f"the loader of '{tensor}' asks for another part than when it was traced")
            for part in self._received[name]:
                where = offset_in(part.slice.box, source_box) if part.slice.name == tensor else None
                if where is not None:
                    part.verify()
                    target[where].copy_(part.values.reshape(target[where].shape))
            self._due.discard((tensor, view))

    def transformed(self, name: str, operation: str) -> None:
        raise RuntimeError(f"the loader of '{name}' computes {operation} of it, which it did not when it was traced")


def offset_in(box: Box, source: SourceBox) -> tuple[slice, ...] | None:
    """Return the index of ``box`` in a copy of ``source``; None if ``source`` does not contain ``box``."""
    if any(low < a or high > b for (low, high), (a, b) in zip(box, source.box, strict=True)):
        return None
    return tuple(
        slice(None) if axis < 0 else slice(box[axis][0] - source.box[axis][0], box[axis][1] - source.box[axis][0])
        for axis in source.axes
    )
