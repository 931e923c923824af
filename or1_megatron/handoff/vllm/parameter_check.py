"""Compares what an engine rank's parameters hold with what it has received for them, inside vLLM's workers.

Parameters are read in place after loading. This finds, by its name, each tensor that a loader puts where another
belongs or does not replace. Where each slice belongs is known from the trace made before the first handoff
(``loader_trace.trace_loaders``); only the log-prob probe finds a loader that was wrong from the start.

Not all parameters can be read so: vLLM may have converted what was loaded to another form (oneDNN's prepacked linears
on CPU, fused experts, quantisation). For these, and for tensors that come whole because their loaders do more than
copy, only what was received is compared with what was sent, and the probe has to show that the engine computes with it.
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

# Methods that leave a parameter as it was loaded, if they leave any of its shape.
_IN_PLACE = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def targets(part: Slice, trace: LoaderTrace) -> Iterator[ParameterView]:
    """Yield the parts of parameters that a slice is copied to."""
    for view, source in trace.sources.get(part.name, {}).items():
        where = offset_in(part.box, source)
        if where is not None:
            yield from (target.part(where) for target in trace.destinations.get((part.name, view), []))


class ParameterCheck:
    """Checks one engine rank, handoff after handoff."""

    def __init__(self, model: torch.nn.Module, trace: LoaderTrace) -> None:
        self._modules = dict(model.named_modules())
        self._trace = trace
        self._readable: dict[Slice, list[ParameterView]] = {}  # the first check takes out those that cannot be read
        self._expected: list[tuple[Slice, int]] = []

    def expect(self, received: ReceivedSlice) -> None:
        """Note what the parameters should hold when this slice has been loaded."""
        part = received.slice
        if part not in self._readable:
            self._readable[part] = list(targets(part, self._trace))
        self._expected.append((part, received.checksum))

    def check(self, handoff: int) -> None:
        """Read all parameters that can be read.

        Raises:
            HandoffMismatch: a parameter holds something else than was received for it; names tensor and parameter.
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
        """Return the parameter if it has the loaded form."""
        module: Any = self._modules[target.module]
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _IN_PLACE:
            return None
        parameter = module._parameters.get(target.parameter)
        if parameter is None or (parameter.dtype, tuple(parameter.shape)) != (dtype, target.shape):
            return None
        return parameter.data if parameter.is_contiguous() else None
