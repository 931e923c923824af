"""What an engine rank's parameters hold, against what it has received for them. Inside vLLM's workers.

Read in place after loading, so that a loader that puts a tensor where another belongs, or leaves the old one there, is
found out and the tensor named. Where each part belongs is known from a recording made before the first handoff
(``recording.trace_loaders``); a loader that has been wrong since then is for the log-prob probe to find.

Not all can be read so: vLLM may have changed what was loaded into another form (oneDNN's prepacked linears on CPU,
fused experts, quantisation). Of these, only what was received is compared with what was sent, and the probe has to show
that the engine computes with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from or1_megatron.handoff.errors import HandoffMismatch
from or1_megatron.handoff.message.buckets import Slice
from or1_megatron.handoff.message.checksum import checksum
from or1_megatron.handoff.message.message import ReceivedSlice
from or1_megatron.handoff.vllm.loader_trace import LoaderTrace, ParameterView, View, offset_in
from or1_megatron.weights.holdings import intersection

log = logging.getLogger(__name__)

# What leaves parameters as they were loaded, wherever it leaves a parameter of the same shape at all.
_IN_PLACE = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


@dataclass(frozen=True, slots=True)
class _Spot:
    """A part of a parameter, and the part of a slice that it should hold."""

    part: Slice
    inner: tuple[slice, ...] | None
    """Of the slice; None: all of it."""
    place: ParameterView
    view: View
    """Of the parameter."""


class ParameterCheck:
    """Of one engine rank, for one handoff after another."""

    def __init__(self, model: torch.nn.Module, trace: LoaderTrace) -> None:
        self._modules = dict(model.named_modules())
        self._trace = trace
        self._spots: dict[Slice, list[_Spot]] = {}  # those that cannot be read are taken out by the first check
        self._expected: list[tuple[Slice, _Spot, int]] = []

    def expect(self, received: ReceivedSlice) -> None:
        """It has arrived, and is on its way into the model."""
        cut = received.cut
        if cut not in self._spots:
            self._spots[cut] = [*self._spots_of(cut)]
        for spot in self._spots[cut]:
            wanted = received.checksum
            if spot.inner is not None:
                wanted = checksum(spot.part, _flat(received.values[spot.inner]), received.handoff)
            self._expected.append((cut, spot, wanted))

    def check(self, handoff: int) -> int:
        """Read all parameters that can be read; returns how many of the received parts they hold.

        Raises:
            HandoffMismatch: a parameter holds something else than was received for it; names tensor and parameter.
        """
        found, expected = 0, self._expected
        self._expected = []
        for cut, spot, wanted in expected:
            place, part = spot.place, spot.part
            parameter = self._in_place(place, part.dtype)
            if parameter is None:
                self._spots[cut].remove(spot)
                continue
            offset, size, stride = spot.view
            region = parameter.as_strided(size, stride, parameter.storage_offset() + offset)
            held = checksum(part, _flat(region), handoff)
            if held != wanted:
                raise HandoffMismatch(
                    f"{part} arrived as it was sent in handoff {handoff}, but '{place.module}.{place.parameter}' "
                    f"of the engine's model holds something else: checksum {held:016x}, expected {wanted:016x}"
                )
            found += 1
        log.info("handoff %d: %d parts compared in place, of %d received", handoff, found, len(expected))
        return found

    def _spots_of(self, cut: Slice) -> Iterator[_Spot]:
        """Where it should be, save where it can be foretold that it cannot be read there."""
        for view, source_box in self._trace.sources.get(cut.name, {}).items():
            shared = intersection(cut.box, source_box.box)
            where = None if shared is None else offset_in(shared, source_box)
            if shared is None or where is None:
                continue
            inner = None
            if shared != cut.box:
                inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(shared, cut.box, strict=True))
            for place in self._trace.destinations.get((cut.name, view), []):
                if self._in_place(place, cut.dtype, loaded=False) is not None:
                    yield _Spot(Slice(cut.name, shared, cut.dtype), inner, place, place.part(where))

    def _in_place(self, place: ParameterView, dtype: torch.dtype, loaded: bool = True) -> Tensor | None:
        """The parameter, if it is what was loaded; before it is ``loaded``, if it may come to be that."""
        module: Any = self._modules[place.module]
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _IN_PLACE:
            return None
        parameter = module._parameters.get(place.parameter)
        if parameter is None or parameter.dtype != dtype:
            return None
        if loaded and (tuple(parameter.shape) != place.shape or not parameter.is_contiguous()):
            return None
        return parameter.data


def _flat(values: Tensor) -> Tensor:
    """[bytes] uint8, row by row."""
    return values.contiguous().flatten().view(torch.uint8)
