"""The trainer's end of a handoff, on every trainer rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.backend_check import VLLMS
from or1_megatron.interfaces import EngineControl, PolicyWeights
from or1_megatron.types import Float32Array, Int32Array

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    from or1_megatron.handoff.gather.trainer import GlooTrainerEngine
    from or1_megatron.handoff.shard.trainer import ShardTrainer


class EngineWeightSender:
    """Sends the weights over vLLM's weight-transfer protocol.

    Rank 0 holds the engines. With the ``gloo`` backend it sends, and the other ranks only iterate the shards, so that
    the collectives behind the iteration meet; with ``shard`` every rank sends what it holds. Other ranks than 0 do not
    import vllm for these. vLLM's own backends are driven through its trainer factory on every rank.
    """

    def __init__(
        self, shards: PolicyWeights, rank: int, config: HandoffConfig, engines: EngineControl | None = None
    ) -> None:
        """
        Args:
            shards: the policy's weights in HF names.
            rank: of this trainer process.
            engines: required on rank 0, ignored elsewhere.
        """
        if rank == 0 and engines is None:
            raise ValueError("EngineWeightSender on trainer rank 0 needs the engines that it shall send to")
        self._shards = shards
        self._config = config
        self._engines = engines if rank == 0 else None
        self._transfer: GlooTrainerEngine | None = None
        self._builtin: TrainerWeightTransferEngine[Any] | None = None
        self._rank = rank
        self._sharded: ShardTrainer | None = None
        if config.backend == "shard":
            from or1_megatron.handoff.shard.trainer import ShardTrainer

            self._sharded = ShardTrainer(shards, rank, config, self._engines)

    def connect(self) -> None:
        """Meet the engines; ``send`` does it when it has not been done. Collective with ``shard``; else rank 0's.

        Raises:
            HandoffError: not all engines came within ``timeout_s``, or one failed.
        """
        if self._sharded is not None:
            self._sharded.connect()
            return
        if self._config.backend in VLLMS:
            if self._builtin is None:
                from or1_megatron.handoff.vllm.builtin import open_builtin

                self._builtin = open_builtin(self._config, self._shards, self._rank, self._engines)
            return
        if self._engines is None or self._transfer is not None:
            return
        from or1_megatron.handoff.gather import trainer as gloo_trainer
        from or1_megatron.handoff.vllm.sources import ShardsSource

        gloo_trainer.register()
        info = gloo_trainer.GlooTrainerInitInfo(
            rank=0,
            address=self._engines.address,
            engines=self._engines.engines,
            workers_per_engine=self._engines.workers_per_engine,
            bucket_bytes=self._config.bucket_bytes,
            timeout_s=self._config.timeout_s,
        )
        transfer = gloo_trainer.WeightTransferTrainerFactory.trainer_init(
            info, client=self._engines, source=ShardsSource(self._shards)
        )
        assert isinstance(transfer, gloo_trainer.GlooTrainerEngine)
        self._transfer = transfer

    def send(self, version: int) -> int:
        """Bring every engine to ``version``, prefix caches emptied; returns the bytes that were sent.

        On ranks other than 0 those that this rank sent; with vLLM's own backends, which do not count, the model's.

        Collective over the trainer's ranks.

        Raises:
            HandoffError: an engine failed, or did not keep up within ``timeout_s``.
        """
        if self._engines is not None:
            self._engines.next_version = version
        if self._sharded is not None:
            return self._sharded.send()
        if self._config.backend in VLLMS:
            self.connect()
            assert self._builtin is not None
            self._builtin.send_weights()
            return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self._shards.metadata())
        if self._engines is None:
            for _ in self._shards:
                pass
            return 0
        try:
            self.connect()
        except BaseException:
            for _ in self._shards:  # as the other ranks do
                pass
            raise
        assert self._transfer is not None
        try:
            self._transfer.send_weights()
        except BaseException:
            self.close()  # the next handoff meets the engines anew
            raise
        return self._transfer.bytes_sent

    def probe(self, token_ids: Sequence[Int32Array]) -> list[list[Float32Array]]:
        """Each engine's log-probs, at temperature 1, of tokens 1.. of each sequence; on ranks other than 0 empty."""
        return [] if self._engines is None else self._engines.score_prompts(token_ids)

    def close(self) -> None:
        if self._sharded is not None:
            self._sharded.close()
        for transfer in (self._transfer, self._builtin):
            if transfer is not None:
                transfer.shutdown()
        self._transfer, self._builtin = None, None
