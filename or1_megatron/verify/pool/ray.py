"""The pool's workers as Ray actors, spread over the cluster's nodes. Only this file of the package uses Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.verify.pool.queue import WorkerLost
from or1_megatron.verify.pool.worker import Bench, Claim, Judged


@ray.remote(num_cpus=0)
class VerifierActor:
    """A bench in a process of its own."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        self._bench = Bench(config, abilities)

    def ready(self) -> bool:
        """Return when construction succeeded; raise what it raised otherwise."""
        return True

    def verify_batch(self, claims: bytes) -> bytes:
        return pack(self._bench.verify_batch(unpack(claims)))

    def close(self) -> None:
        self._bench.close()


class RayWorker:
    """``pool.queue.Worker`` over an actor, which starts here."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str], options: Mapping[str, Any]) -> None:
        self._actor: Any = VerifierActor.options(**options).remote(config, abilities)  # type: ignore[attr-defined]

    async def ready(self) -> None:
        await _outcome(self._actor.ready.remote())

    async def verify_batch(self, claims: Sequence[Claim]) -> Judged:
        judged: Judged = unpack(await _outcome(self._actor.verify_batch.remote(pack(list(claims)))))
        return judged

    async def close(self) -> None:
        await _outcome(self._actor.close.remote())

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


def ray_workers(
    config: VerifyConfig, abilities: frozenset[str], options: Mapping[str, Any] | None = None
) -> Callable[[], RayWorker]:
    """Return what makes the workers of a ``VerifierPool``. ``options`` go to every actor (node affinity, ...)."""
    chosen = {"num_cpus": 0, "scheduling_strategy": "SPREAD", **(options or {})}
    return lambda: RayWorker(config, abilities, chosen)


def on_one_node() -> bool:
    """Whether the cluster that this process is connected to has one node."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


async def _outcome(call: Any) -> Any:
    try:
        return await asyncio.wrap_future(call.future())
    except RayError as error:
        raise WorkerLost(f"{type(error).__name__}: {error}") from error
