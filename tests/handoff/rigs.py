"""One trainer and its engines for each transport that runs here, behind one interface, and faults to inject.

Another transport is a line in ``TRANSPORTS`` and, if its bytes go another way, a class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from engine_fixtures import TinyModel
from sharded_trainer import Grid, Trainer

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.gather import trainer as gloo_trainer
from or1_megatron.handoff.sender import EngineWeightSender
from or1_megatron.handoff.transport.base import GlooTransport
from or1_megatron.handoff.transport.shared_memory import SharedMemoryTransport
from or1_megatron.types import Float32Array, Int32Array

Tamper = Callable[[torch.Tensor], None]
"""Changes a message [bytes] uint8 on its way."""


class StateDictShards:
    """``interfaces.WeightShards`` over an HF model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.model.state_dict().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.state_dict().items()


class WholeTensors:
    """The ``gloo`` backend."""

    def __init__(self, model: Any, config: HandoffConfig, control: Any) -> None:
        self._shards = StateDictShards(model)
        self._sender = EngineWeightSender(self._shards, 0, config, control)

    def send(self, model: Any, version: int) -> None:
        self._shards.model = model
        self._sender.send(version)

    def close(self) -> None:
        self._sender.close()

    @contextmanager
    def tampering(self, tamper: Tamper) -> Iterator[None]:
        """What is sent is changed after it has been packed."""
        true = gloo_trainer.broadcast

        def broadcast(group: Any, buffer: torch.Tensor) -> Any:
            tamper(buffer)
            return true(group, buffer)

        gloo_trainer.broadcast = broadcast  # type: ignore[assignment]
        try:
            yield
        finally:
            gloo_trainer.broadcast = true


class Slices:
    """The ``shard`` backend, from a trainer of TP 2."""

    def __init__(self, model: Any, config: HandoffConfig, control: Any) -> None:
        self._control = control
        self._trainer = Trainer(Grid(model, 2, 1, 1), config, control)

    def send(self, model: Any, version: int) -> None:
        self._trainer.grid.model = model
        self._control.next_version = version
        try:
            self._trainer.send()
        except RuntimeError:
            self._trainer.close()  # as the trainer's ranks agree to do
            raise

    def close(self) -> None:
        self._trainer.close()

    @contextmanager
    def tampering(self, tamper: Tamper) -> Iterator[None]:
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


TRANSPORTS: dict[str, tuple[str, type[WholeTensors] | type[Slices], dict[str, Any]]] = {
    "gloo": ("gloo", WholeTensors, {}),
    "shard": ("shard", Slices, {}),
    "shared_memory": ("shard", Slices, {"transport": "shared_memory"}),
}
"""Name to (``handoff.backend``, trainer, other keys of ``HandoffConfig``)."""


def perturbed(model: Any, seed: int) -> Any:
    """An HF model with every tensor changed by noise of its own size."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator))
    return other


def scores(model: Any, sequences: list[Int32Array]) -> list[Float32Array]:
    """transformers' log-probs of tokens 1.. of each sequence."""
    oracle = TinyModel(None, model)  # type: ignore[arg-type]
    return [oracle.log_probs(ids[:1].tolist(), ids[1:].tolist()).astype(np.float32) for ids in sequences]


# Faults inside an engine's process. Functions nested in these are pickled by value.


def in_engine(handle: Any, function: Callable[[Any], Any]) -> Any:
    """``function(VllmEngine)`` on the engine's thread, in its process."""

    def run(actor: Any) -> Any:
        return actor._thread.call(function)

    return ray.get(handle.__ray_call__.remote(run), timeout=60)


@contextmanager
def swapped_in_loader(handle: Any, one: str, other: str) -> Iterator[None]:
    """The model's loader takes two tensors for each other, and so does what puts slices where loaders would."""

    def swap(engine: Any) -> None:
        from dataclasses import replace

        from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

        from or1_megatron.handoff.shard.direct_copy import DirectCopy

        load, put = Qwen2ForCausalLM.load_weights, DirectCopy.put
        names = {one: other, other: one}

        def load_weights(model: Any, weights: Any) -> Any:
            return load(model, ((names.get(name, name), tensor) for name, tensor in weights))

        def put_elsewhere(direct_copy: Any, received: Any) -> None:
            received.verify()
            elsewhere = replace(received.cut, name=names.get(received.cut.name, received.cut.name))
            put(direct_copy, replace(received, slot=replace(received.slot, spec=elsewhere)))

        def undo() -> None:
            Qwen2ForCausalLM.load_weights, DirectCopy.put = load, put  # type: ignore[method-assign]

        Qwen2ForCausalLM.load_weights, DirectCopy.put = load_weights, put_elsewhere  # type: ignore[method-assign]
        engine.undo = undo

    in_engine(handle, swap)
    try:
        yield
    finally:
        in_engine(handle, lambda engine: engine.undo())


@contextmanager
def stale_prefix_cache(handle: Any) -> Iterator[None]:
    """Nobody empties it after the update."""

    def keep(engine: Any) -> None:
        from or1_megatron.rollout import engine as module

        true = module.forget
        module.forget = lambda *arguments: None  # type: ignore[assignment]
        engine.undo = lambda: setattr(module, "forget", true)

    in_engine(handle, keep)
    try:
        yield
    finally:
        in_engine(handle, lambda engine: engine.undo())


@contextmanager
def stale_packed_weights(handle: Any) -> Iterator[None]:
    """The last layer's MLP goes on with what was packed for oneDNN before the update."""

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

    in_engine(handle, keep)
    try:
        yield
    finally:
        in_engine(handle, lambda engine: engine.undo())
