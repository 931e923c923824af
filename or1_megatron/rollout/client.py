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
from or1_megatron.rollout.pool import START_S, EnginePool
from or1_megatron.rollout.ray_errors import failure_of
from or1_megatron.types import Group, Prompt, RefillRule, RolloutReport, Sampling

_MARGIN_S = 30.0  # the manager's own deadline comes first: its message names the requests
_PROGRESS_S = 0.2
_STOP_POLL_S = 0.5


class RolloutsClient:
    """Implements ``interfaces.Rollouts`` with the manager actor. Every wait has a deadline."""

    def __init__(self, manager: Any, step_timeout_s: float, stop: Callable[[], bool]) -> None:
        """``stop``: true once the run has been asked to stop; waits then end with ``Stopped``."""
        self._manager = manager
        self._stop = stop
        self._deadline_s = step_timeout_s + _MARGIN_S
        self._progress = (0, 0)
        self._revive: Callable[[], None] | None = None

    def revive_with(self, revive: Callable[[], None]) -> None:
        """Let an engine's death end no roll-out from now on: others sample its requests, and waits call ``revive``.

        ``revive`` replaces the engine and calls ``rejoin``.
        """
        self._revive = revive
        self._call("expect_successors")

    def rejoin(self, engines: Sequence[Any]) -> None:
        """Pass on the handles of all engines, after some have been replaced and serve again."""
        self._call("rejoin", list(engines))

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        refill: RefillRule | None = None,
    ) -> None:
        """Start sampling; return when the first requests are sent to the engines.

        Raises:
            RolloutError: an engine or the verification failed, or the deadline passed; so do all methods.
            Stopped: a stop has been requested, and the roll-out is lost; so does every wait.
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
        """Give up the current roll-out, if there is one; return when the engines are idle.

        It may take half a minute, whether or not a stop is requested: it is part of one, whose grace period passes.
        """
        self._call("abandon")

    def progress(self) -> tuple[int, int]:
        """Return (responses finished, responses requested); the last known if the manager does not answer at once."""
        try:
            self._progress = self._call("progress", timeout_s=_PROGRESS_S)
        except RolloutError:
            pass  # those who wait for the roll-out get the error
        return self._progress

    def close(self) -> None:
        """End the manager and its verifiers."""
        try:
            self._call("close")
        except RolloutError:
            pass  # it is killed anyway
        ray.kill(self._manager, no_restart=True)

    def _call(self, method: str, *args: Any, timeout_s: float = _MARGIN_S) -> Any:
        """Call what the manager answers at once. Unlike ``_get`` it revives no engine: ``_get`` itself needs it."""
        try:
            return ray.get(getattr(self._manager, method).remote(*args), timeout=timeout_s)
        except RayError as error:
            raise RolloutError(f"the RolloutManager did not answer '{method}': {failure_of(error)}") from error

    def _engines_lost(self) -> bool:
        try:
            return bool(self._call("engines_lost", timeout_s=_PROGRESS_S))
        except RolloutError:
            return False  # asked again soon; the manager's own death ends the wait

    def _get(self, call: Any) -> Any:
        """Wait for the manager's answer; meanwhile revive lost engines."""
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
        abilities: those of the problems that will come, e.g. {"math"}.
        ray_options: for manager and verifiers, e.g. a scheduling strategy.
        stop: true once the run has been asked to stop.

    Raises:
        RolloutError: the manager or a verifier did not start.
    """
    options = {"name": "rollout-manager", "namespace": namespace(run_id), **(ray_options or {})}
    manager = ManagerActor.options(**options).remote(
        engines.handles, config.max_concurrent, verify, abilities, dict(ray_options or {}), config.step_timeout_s
    )
    timeout_s = config.start_timeout_s or START_S
    try:
        ray.get(manager.start.remote(), timeout=timeout_s)
    except GetTimeoutError as error:
        raise RolloutError(
            f"rollout manager and verifiers were not up after {timeout_s:g} s (rollout.start_timeout_s)"
        ) from error
    except RayError as error:
        raise RolloutError(f"rollout manager and verifiers did not start: {failure_of(error)}") from error
    return RolloutsClient(manager, config.step_timeout_s, stop)
