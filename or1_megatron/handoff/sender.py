"""The trainer's end of a handoff, whichever the backend."""

from __future__ import annotations

from typing import Protocol

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.gather import GatherTrainer
from or1_megatron.handoff.shard.trainer import ShardTrainer
from or1_megatron.interfaces import EngineControl, PolicyWeights


class WeightSender(Protocol):
    """A trainer rank's end of the handoff."""

    def send(self, version: int) -> int:
        """Bring every engine to ``version``, prefix caches emptied; collective over the trainer's ranks.

        Returns the bytes that were sent; on ranks other than 0 those that this rank sent.

        Raises:
            SendError: on every rank: an engine or a trainer rank failed, or did not keep up within ``timeout_s``.
        """

    def close(self) -> None:
        """Leave the engines; the next ``send`` meets them anew."""


def make_sender(
    weights: PolicyWeights, rank: int, config: HandoffConfig, engines: EngineControl | None = None
) -> WeightSender:
    """Return the sender of ``config.backend`` for trainer rank ``rank``.

    Only rank 0 needs ``engines``, and no rank imports vllm.
    """
    if rank == 0 and engines is None:
        raise ValueError("the sender of trainer rank 0 needs the engines that it sends to")
    engines = engines if rank == 0 else None
    backend = ShardTrainer if config.backend == "shard" else GatherTrainer
    return backend(weights, rank, config, engines)
