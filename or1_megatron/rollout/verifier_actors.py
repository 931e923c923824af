"""Verifier workers as Ray actors, spread over the nodes of the cluster."""

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
    """A Ray actor with verifiers, in a process of its own."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        self._verifiers = one_by_one(config, abilities)

    def ready(self) -> bool:
        """Return once the construction has succeeded. Ray raises the construction's error here if it failed."""
        return True

    def verify(self, attempt: bytes) -> bytes:
        return pack(self._verifiers.verify(*unpack(attempt)))

    def close(self) -> None:
        self._verifiers.close()


class RayWorker:
    """Implements ``pool.queue.Worker`` with a VerifierActor, which the constructor starts."""

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
    """Return a function that makes workers of a ``VerifierPool``. ``options``: Ray's options of every actor."""
    chosen = {"num_cpus": 0, "scheduling_strategy": "SPREAD", **(options or {})}
    return lambda: RayWorker(config, abilities, chosen)


def on_one_node() -> bool:
    """Return whether the Ray cluster of this process has a single node."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


async def _outcome(call: Any) -> Any:
    try:
        return await asyncio.wrap_future(call.future())
    except RayError as error:
        raise WorkerLost(f"{type(error).__name__}: {error}") from error
