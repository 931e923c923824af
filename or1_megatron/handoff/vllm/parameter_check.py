"""Compares what an engine rank's parameters hold with what it has received for them, inside vLLM's workers.

Parameters are read in place after loading, so that a loader that puts a tensor where another belongs, or leaves the old
one there, is found and the tensor named. Where each slice belongs is known from the trace made before the first handoff
(``loader_trace.trace_loaders``); a loader that has been wrong since then is for the log-prob probe to find.

Not all parameters can be read so: vLLM may have changed what was loaded into another form (oneDNN's prepacked linears
on CPU, fused experts, quantisation). For these, only what was received is compared with what was sent, and the probe
has to show that the engine computes with it.
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
from or1_megatron.handoff.vllm.loader_trace import LoaderTrace, ParameterView, offset_in
from or1_megatron.weights.holdings import intersection

log = logging.getLogger(__name__)

# Methods that leave a parameter as it was loaded, if they leave one of its shape at all.
_IN_PLACE = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


@dataclass(frozen=True, slots=True)
class _Spot:
    """A part of a parameter, and the part of a slice that it should hold."""

    place: ParameterView
    part: Slice
    inner: tuple[slice, ...] | None
    """Where ``part`` is in the slice; None: it is all of it."""


class ParameterCheck:
    """Checks one engine rank, handoff after handoff."""

    def __init__(self, model: torch.nn.Module, trace: LoaderTrace) -> None:
        self._modules = dict(model.named_modules())
        self._trace = trace
        self._spots: dict[Slice, list[_Spot]] = {}  # those that cannot be read are taken out by the first check
        self._expected: list[tuple[Slice, _Spot, int]] = []

    def expect(self, received: ReceivedSlice) -> None:
        """Note what the parameters should hold when this slice has been loaded."""
        if received.slice not in self._spots:
            self._spots[received.slice] = [*self._spots_of(received.slice)]
        for spot in self._spots[received.slice]:
            wanted = received.checksum
            if spot.inner is not None:
                wanted = checksum(spot.part, _flat(received.values[spot.inner]), received.handoff)
            self._expected.append((received.slice, spot, wanted))

    def check(self, handoff: int) -> None:
        """Read all parameters that can be read.

        Raises:
            HandoffMismatch: a parameter holds something else than was received for it; names tensor and parameter.
        """
        found, expected = 0, self._expected
        self._expected = []
        for received, spot, wanted in expected:
            place, part = spot.place, spot.part
            parameter = self._in_place(place, part.dtype)
            if parameter is None:
                self._spots[received].remove(spot)
                continue
            held = checksum(part, _flat(place.of(parameter)), handoff)
            if held != wanted:
                raise HandoffMismatch(
                    f"{part} arrived as it was sent in handoff {handoff}, but '{place.module}.{place.parameter}' "
                    f"of the engine's model holds something else: checksum {held:016x}, expected {wanted:016x}"
                )
            found += 1
        log.info("handoff %d: %d slices compared in place, of %d received", handoff, found, len(expected))

    def _spots_of(self, received: Slice) -> Iterator[_Spot]:
        """Yield where a slice should be, except where it is clear beforehand that it cannot be read."""
        for view, source in self._trace.sources.get(received.name, {}).items():
            shared = intersection(received.box, source.box)
            where = None if shared is None else offset_in(shared, source)
            if shared is None or where is None:
                continue
            inner = None
            if shared != received.box:
                inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(shared, received.box, strict=True))
            for place in self._trace.destinations.get((received.name, view), []):
                if self._in_place(place, received.dtype, loaded=False) is not None:
                    yield _Spot(place.part(where), Slice(received.name, shared, received.dtype), inner)

    def _in_place(self, place: ParameterView, dtype: torch.dtype, loaded: bool = True) -> Tensor | None:
        """Return the parameter if it holds what was loaded; before it is ``loaded``, if it may come to hold that."""
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
    """Return [bytes] uint8, row by row."""
    return values.contiguous().flatten().view(torch.uint8)
