"""The ``gloo`` backend: rank 0 gathers every tensor whole, and sends it to all engine ranks.

The plain fallback for ``shard``, over the same connection: trainer rank 0 is the only sender; every engine rank asks
for all tensors whole and loads them with vLLM's own loaders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.shard.trainer import Read, ShardTrainer
from or1_megatron.interfaces import EngineControl, PolicyWeights
from or1_megatron.weights.holdings import Box, Holding, whole


class GatherTrainer(ShardTrainer):
    """``sender.WeightSender``: rank 0 sends, and the other ranks take part in gathering."""

    whole_tensors = True

    def __init__(self, weights: PolicyWeights, rank: int, config: HandoffConfig, engines: EngineControl | None) -> None:
        super().__init__(weights, rank, config, engines)
        self._senders = 1
        self._transport = "gloo"

    def _holdings(self) -> list[Holding]:
        return [Holding(name, whole(shape), (0,)) for name, _, shape in self._weights.metadata()]

    @contextmanager
    def _reading(self) -> Iterator[Read]:
        """Gather tensor after tensor, as they are read; to the end in any case, since all ranks gather together."""
        tensors = Gathered(self._weights)
        try:
            yield tensors.read
        finally:
            tensors.finish()


class Gathered:
    """One pass through a policy's whole tensors, which are read in the order of its metadata."""

    def __init__(self, weights: PolicyWeights) -> None:
        self._declared = iter(weights.metadata())
        self._tensors = iter(weights)
        self._name = ""
        self._tensor: Tensor | None = None

    def read(self, name: str, box: Box) -> Tensor:
        """Return a rectangle of the current tensor or of a later one.

        Raises:
            ValueError: the tensors that come are not those that metadata() declares.
        """
        while self._name != name:
            self._advance()
        assert self._tensor is not None
        return self._tensor[tuple(slice(*bounds) for bounds in box)]

    def _advance(self) -> None:
        declared, found = next(self._declared), next(self._tensors, None)
        if found is None:
            raise ValueError(f"weights: iteration ended before '{declared[0]}', which metadata() declares")
        name, tensor = found
        if tensor is None or (name, tensor.dtype, tuple(tensor.shape)) != declared:
            came = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(
                f"weights: metadata() declares '{declared[0]}' {declared[1]} {declared[2]}, iteration yields '{name}' "
                f"{came}"
            )
        self._name, self._tensor = name, tensor

    def finish(self) -> None:
        for _ in self._tensors:
            pass
