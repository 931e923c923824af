"""A trainer whose messages can be changed, and faults to inject."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import ray
import torch
from engine_fixtures import TinyModel
from sharded_trainer import Grid, Trainer

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.transport.base import GlooTransport
from or1_megatron.handoff.transport.shared_memory import SharedMemoryTransport
from or1_megatron.types import Float32Array, Int32Array

Tamper = Callable[[torch.Tensor], None]
"""Changes a message [bytes] uint8 on its way."""


class TamperedTrainer:
    """A trainer of TP 2 whose messages can be changed on their way."""

    def __init__(self, model: Any, config: HandoffConfig, control: Any) -> None:
        self._trainer = Trainer(Grid(model, 2, 1, 1), config, control)

    def send(self, model: Any, version: int) -> None:
        self._trainer.grid.model = model
        self._trainer.send(version)

    def close(self) -> None:
        self._trainer.close()

    @contextmanager
    def tampering(self, tamper: Tamper) -> Iterator[None]:
        """Within the block, let ``tamper`` change each message between packing and sending."""
        true = {kind: kind.send for kind in (GlooTransport, SharedMemoryTransport)}

        def send(transport: Any, buffer: torch.Tensor, destination: int, number: int) -> Any:
            tamper(buffer)
            return true[type(transport)](transport, buffer, destination, number)

        for kind in true:
            kind.send = send  # type: ignore[method-assign]
        try:
            yield
        finally:
            for kind, method in true.items():
                kind.send = method  # type: ignore[method-assign]


def perturbed(model: Any, seed: int) -> Any:
    """Return a copy of an HF model with noise added to every tensor, in proportion to the tensor's size."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [bias for name, bias in other.named_buffers() if name.endswith("correction_bias")]
        for parameter in (*other.parameters(), *biases):
            parameter.add_(0.3 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator))
    return other


def scores(model: Any, sequences: list[Int32Array]) -> list[Float32Array]:
    """Return transformers' log-probs of all tokens of each sequence except the first token."""
    oracle = TinyModel(None, model)  # type: ignore[arg-type]
    return [oracle.log_probs(ids[:1].tolist(), ids[1:].tolist()).astype(np.float32) for ids in sequences]


# Faults inside an engine's process. Functions nested in these are pickled by value.


def in_engine(handle: Any, function: Callable[[Any], Any]) -> Any:
    """Call ``function`` with the VllmEngine on the engine's thread, in the engine's process; return the result."""

    def run(actor: Any) -> Any:
        return actor._thread.call(function)

    return ray.get(handle.__ray_call__.remote(run), timeout=240)


@contextmanager
def fault(handle: Any, bring: Callable[[Any], None]) -> Iterator[None]:
    """Apply ``bring`` to an engine, and after the block call ``engine.undo``, which ``bring`` has set."""
    in_engine(handle, bring)
    try:
        yield
    finally:
        in_engine(handle, lambda engine: engine.undo())


def swapped_in_loader(handle: Any, one: str, other: str) -> AbstractContextManager[None]:
    """Make the engine swap two tensors when it loads weights, both in the model's loader and in direct copies."""

    def swap(engine: Any) -> None:
        from dataclasses import replace

        from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

        from or1_megatron.handoff.vllm.direct_copy import DirectCopy

        load, copy = Qwen2ForCausalLM.load_weights, DirectCopy.copy
        names = {one: other, other: one}

        def load_weights(model: Any, weights: Any) -> Any:
            return load(model, ((names.get(name, name), tensor) for name, tensor in weights))

        def copy_elsewhere(direct_copy: Any, received: Any) -> None:
            received.verify()
            elsewhere = replace(received.slice, name=names.get(received.slice.name, received.slice.name))
            copy(direct_copy, replace(received, slot=replace(received.slot, slice=elsewhere)))

        def undo() -> None:
            Qwen2ForCausalLM.load_weights, DirectCopy.copy = load, copy  # type: ignore[method-assign]

        Qwen2ForCausalLM.load_weights, DirectCopy.copy = load_weights, copy_elsewhere  # type: ignore[method-assign]
        engine.undo = undo

    return fault(handle, swap)


def stale_prefix_cache(handle: Any) -> AbstractContextManager[None]:
    """Keep the engine from emptying its prefix cache after a weight update."""

    def keep(engine: Any) -> None:
        engine._engine.reset_prefix_cache = lambda **arguments: True
        engine.undo = lambda: delattr(engine._engine, "reset_prefix_cache")

    return fault(handle, keep)


def stale_packed_weights(handle: Any) -> AbstractContextManager[None]:
    """Make the last layer's MLP use the weights that were packed for oneDNN before the update."""

    def keep(engine: Any) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        true = UnquantizedLinearMethod.process_weights_after_loading

        def process(method: Any, layer: Any) -> None:
            old = getattr(layer, "cpu_linear", None)
            true(method, layer)
            if old is not None and "layers.1.mlp.gate_up_proj" in layer.prefix:
                layer.cpu_linear = old

        UnquantizedLinearMethod.process_weights_after_loading = process
        engine.undo = lambda: setattr(UnquantizedLinearMethod, "process_weights_after_loading", true)

    return fault(handle, keep)
