"""Checks, in vLLM's workers after loading, that an engine rank's parameters hold the slices received for them.

If a parameter is wrong, the sender gets the error, and ``synced_policy`` ends the run, unless an engine was lost.

Parameters are read in place after loading. The check names the first tensor that a loader misplaced or did not
replace. The place of each slice is known from the trace before the first handoff (``loader_trace.trace_loaders``).
A loader that was wrong from the start is found only by the log-prob probe.

Not all parameters can be read in place, because vLLM may have converted them (oneDNN's prepacked linears on CPU, fused
experts, quantisation). For these, and for tensors whose loaders do more than copy, only the received bytes are compared
with the sent bytes, and the probe has to show that the engine computes with them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from or1_megatron.handoff.failures import HandoffMismatch
from or1_megatron.handoff.message.checksum import checksum
from or1_megatron.handoff.message.shipment import ReceivedSlice
from or1_megatron.handoff.message.slices import Slice
from or1_megatron.handoff.vllm.loader_trace import LoaderTrace, ParameterView, offset_in

log = logging.getLogger(__name__)

# Methods that keep a parameter in its loaded form, if they keep its shape.
_IN_PLACE = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def targets(part: Slice, trace: LoaderTrace) -> Iterator[ParameterView]:
    """Yield the parts of parameters to which the slice ``part`` is copied."""
    for view, source in trace.sources.get(part.name, {}).items():
        where = offset_in(part.box, source)
        if where is not None:
            yield from (target.part(where) for target in trace.destinations.get((part.name, view), []))


class ParameterCheck:
    """Checks the parameters of one engine rank after each handoff."""

    def __init__(self, model: torch.nn.Module, trace: LoaderTrace) -> None:
        self._modules = dict(model.named_modules())
        self._trace = trace
        self._readable: dict[Slice, list[ParameterView]] = {}  # the first check removes parameters that cannot be read
        self._expected: list[tuple[Slice, int]] = []

    def expect(self, received: ReceivedSlice) -> None:
        """Remember the checksum that the slice's place in the parameters must have after loading."""
        part = received.slice
        if part not in self._readable:
            self._readable[part] = list(targets(part, self._trace))
        self._expected.append((part, received.checksum))

    def check(self, handoff: int) -> None:
        """Compare each slice's checksum with that of its place in the parameters, if the place can be read.

        Raises:
            HandoffMismatch: a parameter differs from the received slice. The message names tensor and parameter.
        """
        compared, expected = 0, self._expected
        self._expected = []
        for part, wanted in expected:
            for target in self._readable[part].copy():
                parameter = self._in_place(target, part.dtype)
                if parameter is None:
                    self._readable[part].remove(target)
                    continue
                held = checksum(part, target.of(parameter).contiguous().flatten().view(torch.uint8), handoff)
                if held != wanted:
                    raise HandoffMismatch(
                        f"{part} arrived as it was sent in handoff {handoff}, but '{target.module}.{target.parameter}' "
                        f"of the engine's model holds something else: checksum {held:016x}, expected {wanted:016x}"
                    )
                compared += 1
        log.info("handoff %d: %d slices compared in place, of %d received", handoff, compared, len(expected))

    def _in_place(self, target: ParameterView, dtype: torch.dtype) -> Tensor | None:
        """Return the parameter if vLLM has kept the form in which it was loaded; else None."""
        module: Any = self._modules[target.module]
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _IN_PLACE:
            return None
        parameter = module._parameters.get(target.parameter)
        if parameter is None or (parameter.dtype, tuple(parameter.shape)) != (dtype, target.shape):
            return None
        return parameter.data if parameter.is_contiguous() else None
