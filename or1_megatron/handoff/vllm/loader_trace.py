"""What a vLLM model's own weight loaders ask for, and how they are fed just that.

Loaders are run on placeholders: tensors of the full HF shape on the meta device, which have no storage. Whatever views
a loader takes of one (narrow, chunk, index), torch itself keeps their geometry; when the loader copies a view into its
parameter, a dispatch mode sees it. That is written down once (``trace_loaders``). So fused projections, tensor
parallelism, tied embeddings and experts need no table here.

At an update most layers need no loader (``placing``). The others' run again on placeholders, through vLLM's layerwise
reload, and their copies are carried out with what was received (``SliceLoader``). A loader that does more to a tensor
than look at a part of it cannot be served so either; it gets the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_layer_size

from or1_megatron.handoff.message.buckets import Slice, TensorSpec
from or1_megatron.handoff.vllm.reload import put_back
from or1_megatron.weights.holdings import Box, whole

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(storage offset, size, stride): what a loader made of a placeholder."""


def _as_it_is() -> None:
    pass


@dataclass(slots=True)
class Part:
    """A rectangle of a tensor, as received."""

    box: Box
    values: Tensor
    verify: Callable[[], None] = _as_it_is
    """Raises when ``values`` are not what was sent."""
    owned: bool = False
    """False: ``values`` may be a view into a message."""

    def verified(self) -> Tensor:
        """The values, compared with what was sent when first asked for: as they are read anyway, from the cache."""
        self.verify()
        self.verify = _as_it_is
        return self.values

    def keep(self) -> None:
        """The message's memory is about to be used again."""
        if not self.owned:
            self.values, self.owned = self.verified().clone(), True


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A rectangle that a loader copies."""

    box: Box
    axes: tuple[int, ...]
    """For each axis of the view that the loader copies from, the tensor's axis behind it; -1 where its size is 1."""


@dataclass(frozen=True, slots=True)
class ParameterView:
    """A part of a model's parameter."""

    module: str
    parameter: str
    view: View
    shape: tuple[int, ...]
    """Of the whole parameter, as the loaders see it: processing may change it afterwards."""

    def part(self, where: tuple[slice, ...]) -> View:
        """A rectangle of it, as a view of the parameter."""
        offset, size, stride = self.view
        return view_of(torch.empty(self.shape, device="meta").as_strided(size, stride, offset)[where])


@dataclass
class LoaderTrace:
    """What the loaders of one engine rank ask for."""

    sources: dict[str, dict[View, SourceBox]] = field(default_factory=dict)
    """By tensor. Tensors that no loader touches (another rank's experts) are absent."""
    whole: dict[str, str] = field(default_factory=dict)
    """Tensors that have to come whole, with the reason."""
    destinations: dict[tuple[str, View], list[ParameterView]] = field(default_factory=dict)
    """By tensor and view of it: where the copies end up."""
    copied_elsewhere: set[str] = field(default_factory=set)
    """Tensors that are copied to anything else than a parameter as well."""
    written_otherwise: set[tuple[str, str]] = field(default_factory=set)
    """(module, parameter) that is written to by anything else than copies of tensors: padding, for instance."""
    elements: dict[str, int] = field(default_factory=dict)
    """By module: how many vLLM's layerwise reload waits for."""

    def wants(self, specs: Sequence[TensorSpec]) -> list[Slice]:
        found = []
        for spec in specs:
            if spec.name in self.whole:
                found.append(Slice(spec.name, whole(spec.shape), spec.dtype))
            else:
                found += [
                    Slice(spec.name, source_box.box, spec.dtype)
                    for source_box in self.sources.get(spec.name, {}).values()
                ]
        return found


def source_box_of(shape: tuple[int, ...], view: View) -> SourceBox | None:
    """The rectangle of a contiguous tensor that a view of it shows, or None when it shows something else."""
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
    """Knows placeholders by their storage, and sees what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, tuple[str, StorageWeakRef]] = {}

    def placeholder(self, spec: TensorSpec) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        storage = tensor.untyped_storage()
        self._names[storage._cdata] = (spec.name, StorageWeakRef(storage))
        return tensor

    def forget_dead(self) -> list[str]:
        """Placeholders that no loader holds any longer."""
        dead = [key for key, (_, storage) in self._names.items() if storage.expired()]
        return [self._names.pop(key)[0] for key in dead]

    def _name(self, value: Any) -> str | None:
        if isinstance(value, Tensor) and value.is_meta:
            found = self._names.get(value.untyped_storage()._cdata)
            return found[0] if found else None
        return None

    def copied(self, destination: Tensor, name: str, source: Tensor) -> None:
        raise NotImplementedError

    def transformed(self, name: str, operation: str) -> None:
        raise NotImplementedError

    def called(self, func: Any, args: Sequence[Any]) -> None:
        """Any operation but a placeholder's copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._name(args[1])) is not None:
            self.copied(args[0], name, args[1])
            return args[0]
        self.called(func, args)
        name = next((found for arg in args if (found := self._name(arg)) is not None), None)
        result = func(*args, **(kwargs or {}))
        if name is not None:
            results = result if isinstance(result, tuple | list) else (result,)
            if any(isinstance(made, Tensor) and self._name(made) != name for made in results):
                self.transformed(name, str(func))
        return result


class _TracingMode(_Placeholders):
    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        super().__init__()
        self.shapes = {spec.name: spec.shape for spec in specs}
        self.trace = LoaderTrace()
        self._parameters: dict[int, tuple[str, str, tuple[int, ...]]] = {}  # by storage

    def know_parameters(self, model: torch.nn.Module) -> None:
        """Of a model whose layerwise reload has begun."""
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                storage = parameter.untyped_storage()._cdata
                self._parameters.setdefault(storage, (path, name, tuple(parameter.shape)))
            self.trace.elements[path] = get_layer_size(module)

    def _note_destination(self, name: str, view: View, destination: Tensor) -> None:
        known = self._parameters.get(destination.untyped_storage()._cdata)
        if known is None:
            self.trace.copied_elsewhere.add(name)
        else:
            place = ParameterView(known[0], known[1], view_of(destination), known[2])
            destinations = self.trace.destinations.setdefault((name, view), [])
            if place not in destinations:
                destinations.append(place)

    def copied(self, destination: Tensor, name: str, source: Tensor) -> None:
        view = view_of(source)
        source_box = source_box_of(self.shapes[name], view)
        if source_box is None:
            self.trace.whole.setdefault(name, f"its loader copies a view of size and stride {view[1:]}")
        elif destination.shape != source.shape:
            self.trace.whole.setdefault(name, "its loader broadcasts it")
        else:
            self.trace.sources.setdefault(name, {})[view] = source_box
            self._note_destination(name, view, destination)

    def transformed(self, name: str, operation: str) -> None:
        self.trace.whole.setdefault(name, f"its loader computes {operation} of it")

    def called(self, func: Any, args: Sequence[Any]) -> None:
        if func._schema.is_mutable:
            for value in args:
                if not isinstance(value, Tensor) or not value.numel():
                    continue
                if (known := self._parameters.get(value.untyped_storage()._cdata)) is not None:
                    self.trace.written_otherwise.add(known[:2])


def trace_loaders(model: torch.nn.Module, model_config: Any, specs: Sequence[TensorSpec]) -> LoaderTrace:
    """Run the model's loaders once on placeholders; the model's weights stay what they are."""
    tracing = _TracingMode(specs)
    initialize_layerwise_reload(model)
    for layer in model.modules():
        get_layerwise_info(layer).load_numel = -(1 << 62)  # no layer shall ever count as complete
    tracing.know_parameters(model)
    left = list(specs)
    try:
        while left:
            taken: list[TensorSpec] = []

            def offered(
                queue: list[TensorSpec] = left, taken: list[TensorSpec] = taken
            ) -> Iterator[tuple[str, Tensor]]:
                for spec in queue:
                    taken.append(spec)
                    yield spec.name, tracing.placeholder(spec)

            try:
                with tracing:
                    model.load_weights(offered())  # type: ignore[operator]  # every vLLM model has it
            except (NotImplementedError, RuntimeError, TypeError) as error:
                if not taken:
                    raise
                tracing.trace.whole[taken[-1].name] = f"its loader fails on a placeholder: {error}"
            left = left[max(1, len(taken)) :]
    finally:
        put_back(model, model_config)
    return tracing.trace


class SliceLoader(_Placeholders):
    """Feeds a model's loaders with received rectangles, as a mode around ``load_weights`` and what follows it.

    One for each update. A tensor's rectangles are let go once vLLM has no use for its placeholder any more; until then
    they may be views into a message, which ``keep_copies`` turns into copies.
    """

    def __init__(self, trace: LoaderTrace, placed: Set[str] = frozenset()) -> None:
        """``placed``: tensors that come without it."""
        super().__init__()
        self._trace = trace
        self._parts: dict[str, list[Part]] = {}
        others = trace.sources.keys() - trace.whole.keys() - placed
        self._due = {(name, view) for name in others for view in trace.sources[name]}

    def offer(self, spec: TensorSpec, parts: list[Part]) -> Tensor:
        """What stands for the tensor of which ``parts`` have been received: a placeholder, or the tensor itself."""
        if spec.name in self._trace.whole:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=parts[0].values.device)
            for part in parts:
                tensor[tuple(slice(*bounds) for bounds in part.box)] = part.verified()
            return tensor
        self._parts[spec.name] = parts
        return self.placeholder(spec)

    def keep_copies(self, waiting: Mapping[str, list[Part]]) -> None:
        """Copy what vLLM still needs, and ``waiting`` (not yet offered): their memory is about to be overwritten.

        What vLLM has no use for any more has been compared with what was sent by then, be it that nobody copied it.
        """
        for name in self.forget_dead():
            for part in self._parts.pop(name, ()):
                part.verified()
        for parts in (*self._parts.values(), *waiting.values()):
            for part in parts:
                part.keep()

    def check_complete(self) -> None:
        """Raises RuntimeError when a rectangle was never copied into a parameter."""
        if self._due:
            name = sorted(self._due)[0][0]
            raise RuntimeError(f"'{name}' was received, but its loader never put it into the model")

    def copied(self, destination: Tensor, name: str, source: Tensor) -> None:
        if destination.is_meta:
            torch.ops.aten.copy_.default(destination, source)  # vLLM counts what is copied
            return
        view = view_of(source)
        source_box = self._trace.sources[name].get(view)
        if source_box is None:
            raise RuntimeError(f"the loader of '{name}' asks for another part than when it was recorded")
        for part in self._parts[name]:
            where = offset_in(part.box, source_box)
            if where is not None:
                destination[where].copy_(part.verified().reshape(destination[where].shape))
        self._due.discard((name, view))

    def transformed(self, name: str, operation: str) -> None:
        raise RuntimeError(f"the loader of '{name}' computes {operation} of it, which it did not when it was recorded")


def offset_in(box: Box, source_box: SourceBox) -> tuple[slice, ...] | None:
    """Where in the destination a received rectangle goes; None when the landing does not contain it."""
    if any(low < a or high > b for (low, high), (a, b) in zip(box, source_box.box, strict=True)):
        return None
    return tuple(
        slice(None)
        if axis < 0
        else slice(box[axis][0] - source_box.box[axis][0], box[axis][1] - source_box.box[axis][0])
        for axis in source_box.axes
    )
