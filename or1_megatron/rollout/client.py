"""The loop's view of the RolloutManager, on trainer rank 0."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from or1_megatron.config.schema import RolloutConfig, VerifyConfig
from or1_megatron.interfaces import Stopped
from or1_megatron.rollout.cluster import namespace
from or1_megatron.rollout.manager import ManagerActor, RolloutError
from or1_megatron.rollout.pool import EnginePool
from or1_megatron.rollout.ray_errors import failure_of
from or1_megatron.types import Group, Prompt, RefillRule, RolloutReport, Sampling

_MARGIN_S = 30.0  # the manager's own deadline comes first: its message knows the requests
_PROGRESS_S = 0.2
_STOP_POLL_S = 0.5


class RolloutsClient:
    """``interfaces.Rollouts`` over the manager actor. Every wait has a deadline."""

    def __init__(self, manager: Any, step_timeout_s: float, stop: Callable[[], bool]) -> None:
        """``stop``: true once the run has been asked to stop; waits then end with ``Stopped``."""
        self._manager = manager
        self._stop = stop
        self._deadline_s = step_timeout_s + _MARGIN_S
        self._progress = (0, 0)
        self._revive: Callable[[], None] | None = None

    def revive_with(self, revive: Callable[[], None]) -> None:
        """From now on the death of an engine ends no roll-out: others sample what it had, and waits call ``revive``.

        That replaces it, and calls ``rejoin``.
        """
        self._revive = revive
        self._tell(self._manager.expect_successors.remote())

    def rejoin(self, engines: Sequence[Any]) -> None:
        """The handles of all engines, of which some have been replaced and serve again."""
        self._tell(self._manager.rejoin.remote(list(engines)))

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        refill: RefillRule | None = None,
    ) -> None:
        """Start sampling; returns when the requests are on their way to the engines.

        Raises:
            RolloutError: as do all methods: an engine or the verification failed, or the deadline passed.
            Stopped: as does every wait, once a stop has been requested; the roll-out is lost.
            ValueError: there is nothing to sample.
        """
        if not prompts or group_size < 1:
            raise ValueError(f"roll_out: {len(prompts)} prompts of {group_size} samples each; expected at least one")
        batch = pickle.dumps((list(prompts), group_size, sampling, seed, refill), protocol=5)
        self._progress = (0, len(prompts) * group_size)
        self._get(self._manager.roll_out.remote(batch))

    def wait_decoded(self) -> None:
        """Block until the last response of the current roll-out has been sampled."""
        self._get(self._manager.wait_decoded.remote())

    def collect(self) -> tuple[list[Group], RolloutReport]:
        """Block until every response has its verdict; groups come in the order of the prompts."""
        groups, report = pickle.loads(self._get(self._manager.collect.remote()))
        return groups, report

    def abandon(self) -> None:
        """Give up the current roll-out, if there is one; back when the engines are idle. No stop cuts it short.

        It has half a minute: this belongs to a stop, whose grace period passes meanwhile.
        """
        try:
            ray.get(self._manager.abandon.remote(), timeout=_MARGIN_S)
        except RayError as error:
            raise RolloutError(f"the roll-out could not be given up: {failure_of(error)}") from error

    def progress(self) -> tuple[int, int]:
        """(responses finished, responses asked for); the last known when the manager does not answer at once."""
        try:
            self._progress = ray.get(self._manager.progress.remote(), timeout=_PROGRESS_S)
        except RayError:
            pass  # whoever waits for the roll-out itself gets the error
        return self._progress

    def close(self) -> None:
        """End the manager and its verifiers."""
        try:
            ray.get(self._manager.close.remote(), timeout=_MARGIN_S)
        except RayError:
            pass  # it is ended either way
        ray.kill(self._manager, no_restart=True)

    @staticmethod
    def _tell(call: Any) -> None:
        """What the manager does at once. Not ``_get``, whose wait may be the one that calls for this."""
        try:
            ray.get(call, timeout=_MARGIN_S)
        except RayError as error:
            raise RolloutError(f"the RolloutManager was not told of its engines: {failure_of(error)}") from error

    def _engines_lost(self) -> bool:
        try:
            return bool(ray.get(self._manager.engines_lost.remote(), timeout=_PROGRESS_S))
        except RayError:
            return False  # asked again soon; the manager's own death ends the wait

    def _get(self, call: Any) -> Any:
        deadline = time.monotonic() + self._deadline_s
        while not ray.wait([call], timeout=_STOP_POLL_S)[0]:
            if self._stop():
                raise Stopped("roll-out abandoned: the run has been asked to stop")
            if self._revive is not None and self._engines_lost():
                self._revive()
            if time.monotonic() > deadline:
                raise RolloutError(f"the RolloutManager did not answer within {self._deadline_s:g} s")
        try:
            return ray.get(call)
        except RayTaskError as error:
            raise RolloutError(str(error.cause)) from error
        except RayError as error:
            raise RolloutError(f"the RolloutManager is lost: {failure_of(error)}") from error


def start_rollouts(
    engines: EnginePool,
    config: RolloutConfig,
    verify: VerifyConfig,
    abilities: frozenset[str],
    run_id: str,
    ray_options: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> RolloutsClient:
    """Start the RolloutManager and its verifiers over engines that need not be up yet.

    Args:
        abilities: of the problems that will come, e.g. {"math"}.
        ray_options: for manager and verifiers, e.g. a scheduling strategy.
        stop: true once the run has been asked to stop.

    Raises:
        RolloutError: the manager or a verifier did not come up.
    """
    options = {"name": "rollout-manager", "namespace": namespace(run_id), **(ray_options or {})}
    manager = ManagerActor.options(**options).remote(
        engines.handles, config.max_concurrent, verify, abilities, dict(ray_options or {}), config.step_timeout_s
    )
    try:
        ray.get(manager.start.remote(), timeout=config.start_timeout_s)
    except GetTimeoutError as error:
        raise RolloutError(
            f"rollout manager and verifiers were not up after rollout.start_timeout_s = {config.start_timeout_s:g}"
        ) from error
    except RayError as error:
        raise RolloutError(f"rollout manager and verifiers did not start: {failure_of(error)}") from error
    return RolloutsClient(manager, config.step_timeout_s, stop)
