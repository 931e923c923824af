"""The workers of the verifiers' pool as Ray actors, spread over the cluster's nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from or1_megatron.runtime.message import MessageDamaged, pack, unpack
from or1_verify.config import VerifyConfig
from or1_verify.pool.queue import WorkerLost
from or1_verify.types import Attempt, Verdict
from or1_verify.verifier_threads import one_by_one


@ray.remote(num_cpus=0)
class VerifierActor:
    """Verifiers in a process of their own."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        self._verifiers = one_by_one(config, abilities)

    def ready(self) -> bool:
        """Return when construction succeeded; raise what it raised otherwise."""
        return True

    def verify(self, attempt: bytes) -> bytes:
        return pack(self._verifiers.verify(*unpack(attempt)))

    def close(self) -> None:
        self._verifiers.close()


class RayWorker:
    """``pool.queue.Worker`` over an actor, which starts here."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str], options: Mapping[str, Any]) -> None:
        self._actor: Any = VerifierActor.options(**options).remote(config, abilities)  # type: ignore[attr-defined]

    async def ready(self) -> None:
        await _outcome(self._actor.ready.remote())

    async def verify(self, attempt: Attempt) -> Verdict:
        answer = await _outcome(self._actor.verify.remote(pack(attempt)))
        try:
            verdict: Verdict = unpack(answer)
        except MessageDamaged as error:
            raise WorkerLost(str(error)) from error
        return verdict

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
