"""What an engine rank's parameters hold, against what it has received for them. Inside vLLM's workers.

Read in place after loading, so that a loader that puts a tensor where another belongs, or leaves the old one there, is
found out and the tensor named. Where each part belongs is known from a recording made before the first handoff
(``recording.record_wants``); a loader that has been wrong since then is for the log-prob probe to find.

Not all can be read so: vLLM may have changed what was loaded into another form (oneDNN's prepacked linears on CPU,
fused experts, quantisation). Of these, only what was received is compared with what was sent, and the probe has to show
that the engine computes with it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from or1_megatron.handoff.certificate import HandoffMismatch
from or1_megatron.handoff.checksum import checksum
from or1_megatron.handoff.plan import Slice
from or1_megatron.handoff.recording import Place, Recorded, View, place_in
from or1_megatron.weights.holdings import Box, intersection

log = logging.getLogger(__name__)

# What leaves parameters as they were loaded, wherever it leaves a parameter of the same shape at all.
_IN_PLACE = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class Inspector:
    """Of one engine rank, for one handoff after another."""

    def __init__(self, model: torch.nn.Module, recorded: Recorded) -> None:
        self._modules = dict(model.named_modules())
        self._recorded = recorded
        self._expected: dict[tuple[str, View, Box], tuple[Slice, int]] = {}
        self._unreadable: set[tuple[str, View]] = set()  # found to be, by the first check

    def expect(self, cut: Slice, values: Tensor, known: int, handoff: int) -> None:
        """``values`` of ``cut``'s shape have arrived as they were sent, with the checksum ``known``."""
        for view, landing in self._recorded.landings.get(cut.name, {}).items():
            shared = intersection(cut.box, landing.box)
            if shared is None or (cut.name, view) in self._unreadable or not self._places(cut, view):
                continue
            if shared == cut.box:
                self._expected[cut.name, view, shared] = cut, known
                continue
            inner = values[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(shared, cut.box, strict=True))]
            part = Slice(cut.name, shared, cut.dtype)
            self._expected[cut.name, view, shared] = part, checksum(part, _flat(inner), handoff)

    def check(self, handoff: int) -> int:
        """Read all parameters that can be read; returns how many of the received parts they hold.

        Raises:
            HandoffMismatch: a parameter holds something else than was received for it; names tensor and parameter.
        """
        found, expected = 0, self._expected
        self._expected = {}
        for (name, view, box), (part, wanted) in expected.items():
            where = place_in(box, self._recorded.landings[name][view])
            for place in self._places(part, view):
                parameter = self._in_place(place, part.dtype)
                if parameter is None or where is None:
                    self._unreadable.add((name, view))
                    continue
                size, stride = place.view[1:]
                region = parameter.as_strided(size, stride, parameter.storage_offset() + place.view[0])[where]
                held = checksum(part, _flat(region), handoff)
                if held != wanted:
                    raise HandoffMismatch(
                        f"{part} arrived as it was sent in handoff {handoff}, but '{place.module}.{place.parameter}' "
                        f"of the engine's model holds something else: checksum {held:016x}, expected {wanted:016x}"
                    )
                found += 1
        log.info("handoff %d: %d parts compared in place, of %d received", handoff, found, len(expected))
        return found

    def _places(self, cut: Slice, view: View) -> list[Place]:
        """Where the tensor's part should be, save where it can be foretold that it cannot be read there."""
        places = self._recorded.places.get((cut.name, view), [])
        return [place for place in places if self._in_place(place, cut.dtype, loaded=False) is not None]

    def _in_place(self, place: Place, dtype: torch.dtype, loaded: bool = True) -> Tensor | None:
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
