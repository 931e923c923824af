"""Hardware files (configs/hardware/*.yaml): rates and memory of a device, its links and node; constants fitted to runs.

Each figure has its source:

    bf16_flops: {value: 9.89e14, source: "data sheet, dense"}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import Field

from or1_megatron.config.base import NonNegativeFloat, PositiveFloat, Section
from or1_megatron.config.load import load_as
from or1_megatron.config.recipes import find, named


class Constant(Section):
    """A number, and the source that it comes from."""

    value: NonNegativeFloat
    source: str


class Fit(Section):
    """Constants fitted to runs of one model. A plan takes the fit of the most similar model (``fit_for``)."""

    model_parameters: PositiveFloat
    """Size of the model that the constants were fitted on. Unit: parameters."""
    experts: bool = False
    """Whether the fitted model is a mixture of experts."""
    iteration_s: Constant
    """Part of a decoding iteration's time that depends neither on the batch nor on the model's bytes."""
    request_s: Constant
    """Part of a decoding iteration's time that each response adds, besides its arithmetic and reads of its KV cache."""
    update_share: Constant
    """Share of ``bf16_flops`` that the update's arithmetic reaches."""
    other_response_s: Constant
    """Time per response that a step spends between rollout and update, and after the update."""
    covers: tuple[str, ...] = ()
    """The loop's verbs whose time is part of ``other_response_s``. A plan does not count their time again."""


class Hardware(Section):
    """Figures of one kind of device and of a node of such devices."""

    title: str
    """Name of the hardware in output."""
    match: tuple[str, ...] = ()
    """The hardware is recognised if CUDA's name of a device contains one of these texts. Empty for a CPU."""
    bf16_flops: Constant
    """Dense bf16 operations per second of a device; on CPU, operations in the run's dtype."""
    memory_bytes: Constant
    """Bytes of memory of a device."""
    memory_bytes_per_s: Constant
    """Bandwidth of the device's memory."""
    link_bytes_per_s: Constant
    """Rate between devices of a node, in one direction, over all links of a device together."""
    host_bytes_per_s: Constant
    """Rate between a device and its host, in one direction."""
    network_bytes_per_s: Constant
    """One device's share of the rate between nodes, in one direction."""
    node_devices: Constant
    """Number of devices of a node."""
    product_share: Constant
    """Share of ``bf16_flops`` that large matrix products reach."""
    memory_share: Constant
    """Share of ``memory_bytes_per_s`` that large reads reach."""
    link_share: Constant
    """Share of a link's rate that large collectives reach."""
    message_s: Constant
    """Time of a small all-reduce within a node."""
    network_message_s: Constant = Constant(value=8.0e-05, source="about as fitted for H100")
    """Time of a small all-reduce between nodes."""
    verdict_s: Constant
    """Time in which one verifier judges one response."""
    busy_share: Constant = Constant(value=1.0, source="devices of a node do not slow each other")
    """Share of its speed that a device keeps while all devices of its node compute. It is below 1 on CPU, where cores
    share memory bandwidth, and other processes also need cores."""
    activation_passes: Constant = Constant(value=0.0, source="part of update_share")
    """How many times an update moves a layer's kept activations through memory, apart from its matrix products."""
    error: Constant
    """Relative error of a predicted step time. A plan's interval is the prediction plus and minus this share of it."""
    fits: tuple[Fit, ...] = Field(min_length=1)

    def fit_for(self, parameters: float, experts: bool = False) -> Fit:
        """Return the fit whose model is nearest in size, of this kind (dense or ``experts``) if there is such a fit."""
        kind = [fit for fit in self.fits if fit.experts == experts] or self.fits
        return min(kind, key=lambda fit: abs(math.log(fit.model_parameters / parameters)))

    def rates(self, parameters: float, experts: bool = False) -> Rates:
        """Return this hardware's figures, with the constants of the fit for this model size and kind (``fit_for``)."""
        fit = self.fit_for(parameters, experts)
        plain = {
            name: getattr(self, name).value for name in Rates.__dataclass_fields__ if name in type(self).model_fields
        }
        fitted = {name: getattr(fit, name).value for name in Rates.__dataclass_fields__ if name in Fit.model_fields}
        return Rates(**plain, **fitted)


@dataclass(frozen=True, slots=True)
class Rates:
    """The values of a Hardware's constants and of one of its fits, under the same names."""

    bf16_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    node_devices: float
    product_share: float
    memory_share: float
    link_share: float
    message_s: float
    network_message_s: float
    verdict_s: float
    busy_share: float
    activation_passes: float
    error: float
    iteration_s: float
    request_s: float
    update_share: float
    other_response_s: float

    def with_busy(self, devices: int) -> Rates:
        """Return the figures of one device while ``devices`` devices of its node compute."""
        if devices < self.node_devices or self.busy_share == 1:
            return self
        share = self.busy_share
        return replace(
            self,
            bf16_flops=self.bf16_flops * share,
            memory_bytes_per_s=self.memory_bytes_per_s * share,
            iteration_s=self.iteration_s / share,
            request_s=self.request_s / share,
        )


@cache
def read_hardware(given: str) -> Hardware:
    """Read a hardware file, given by its path or by the name of a packaged file.

    Raises:
        ConfigError: the file does not exist (the message lists known names), or is not a hardware file.
    """
    return load_as(Hardware, find("hardware", Path(given if Path(given).is_file() else given.lower())))


def hardware_of(device_name: str) -> Hardware | None:
    """Return the packaged hardware file for a device that CUDA calls ``device_name``; None if no file matches."""
    known = map(read_hardware, named("hardware"))
    return next((hardware for hardware in known if any(part in device_name for part in hardware.match)), None)
