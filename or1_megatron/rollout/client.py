"""Implements ``interfaces.Rollouts`` on trainer rank 0: calls the RolloutManager, and restarts a lost manager."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.interfaces import Stopped
from or1_megatron.rollout.cluster import CHECK_EVERY_S, check_ray, namespace, wait_for
from or1_megatron.rollout.engine_pool import START_S, EnginePool
from or1_megatron.rollout.manager import ANSWER_S, ManagerActor, RolloutError
from or1_megatron.rollout.ray_errors import failure_of
from or1_megatron.rollout.request_plan import plan_requests, request_digest
from or1_megatron.runtime.message import MessageDamaged, pack, unpack
from or1_megatron.runtime.timeline import span
from or1_megatron.types import Completion, Group, Prompt, RefillRule, Request, RolloutReport, Sampling
from or1_verify.config import VerifyConfig

log = logging.getLogger(__name__)

_MARGIN_S = 30.0  # the manager's own deadline comes first: its message names the requests
_PROGRESS_S = 0.2
_RESPONSES_S = 5.0  # a stop may leave little time for its checkpoint
_STOP_POLL_S = 0.5


@dataclass(slots=True)
class _RequestedRollout:
    """A rollout under way, with all that is needed to request it again from another manager."""

    batch: bytes
    manager_ticket: int
    """The rollout's ticket at the present manager."""
    restored: list[Completion]
    """The rollout's responses that came from a checkpoint (``restore_responses``)."""
    urgent: bool


class RolloutsClient:
    """Implements ``interfaces.Rollouts`` with the manager actor. Every wait has a deadline.

    After ``allow_restarts`` was called, a lost manager is restarted. The engines abort the lost manager's requests. The
    new manager takes the responses that the engines have finished, and requests all others again with the same seeds.
    """

    def __init__(
        self,
        engines: EnginePool,
        config: RolloutConfig,
        verify: VerifyConfig,
        abilities: frozenset[str],
        run_id: str,
        stop: Callable[[], bool] = lambda: False,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Start the RolloutManager and its verifiers. The engines may still be starting.

        Args:
            abilities: the abilities of the problems to verify, such as {"math"}.
            stop: returns true once the run has been asked to stop; waits then end with ``Stopped``.
            answer_s: passed to ``RolloutManager``.

        Raises:
            RolloutError: the manager or a verifier did not start.
            RayLost: Ray was lost meanwhile.
        """
        self._pool, self._config, self._run_id = engines, config, run_id
        self._manager_settings = config.max_concurrent, verify, abilities, config.step_timeout_s
        self._answer_s = answer_s
        self._number = 0
        self._manager = self._start_manager()
        self._stop = stop
        self._deadline_s = config.step_timeout_s + _MARGIN_S
        self._restarts_left = self._max_restarts = config.max_engine_restarts
        self._progress = (0, 0)
        self._under_way: dict[int, _RequestedRollout] = {}  # by ticket of this client
        self._tickets = itertools.count(1)
        self._collected: list[Completion] = []  # and not trained
        self._restored: dict[int, Completion] = {}  # by seed: responses of a checkpoint, until they are requested
        self._restart_engines: Callable[[], None] | None = None
        self._on_manager_restart: Callable[[str], None] = lambda reason: None
        self._in_turns = False

    def allow_restarts(
        self,
        restart_engines: Callable[[], None],
        on_manager_restart: Callable[[str], None] = lambda reason: None,
        in_turns: bool = False,
    ) -> None:
        """From now on, restart lost engines and a lost manager instead of ending the wait with an error.

        Args:
            restart_engines: a function that restarts lost engines and then calls ``engines_restarted``. Until this
                call, other engines can already sample the lost engines' requests.
            on_manager_restart: called with the reason when the manager is restarted.
            in_turns: whether engines and trainer use the same GPUs in turns, so that no engine may decode during
                ``restart_engines``. The engines then abort all requests first, and a new manager requests them again.
        """
        self._restart_engines, self._on_manager_restart, self._in_turns = restart_engines, on_manager_restart, in_turns

    def engines_restarted(self, engines: Sequence[Any]) -> None:
        """Give the manager the handles of all engines, after some engines were restarted and serve again."""
        self._call("engines_restarted", list(engines))

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        rule: RefillRule | None = None,
        urgent: bool = False,
    ) -> int:
        """Start sampling and return the rollout's ticket. The arguments are those of ``interfaces.Rollouts``.

        Raises:
            RolloutError: an engine or the verification failed, or the deadline passed. All methods raise this.
            RayLost: Ray is lost. All methods that wait raise this.
            Stopped: a stop has been requested, and the rollout is abandoned. All methods that wait raise this.
            ValueError: there is nothing to sample.
        """
        if not prompts or group_size < 1:
            raise ValueError(f"roll_out: {len(prompts)} prompts of {group_size} samples each; expected at least one")
        if self._config.router_replay and not urgent:  # evaluations do not need them
            sampling = replace(sampling, routed_experts=True)
        arguments = {"prompts": list(prompts), "group_size": group_size, "sampling": sampling, "seed": seed}
        batch = pack(arguments | {"rule": rule, "urgent": urgent})
        self._progress = (0, len(prompts) * group_size)
        may_restore = self._restored and not urgent
        requests: Iterable[Request] = plan_requests(prompts, group_size, sampling, seed).values() if may_restore else ()
        restored = self._restored_for(requests)
        known = [pack(restored)]
        manager_ticket = self._get(lambda manager: manager.roll_out.remote(batch, known))
        for request in requests:
            self._restored.pop(request.seed, None)
        ticket = next(self._tickets)
        self._under_way[ticket] = _RequestedRollout(batch, manager_ticket, restored, urgent)
        return ticket

    def _restored_for(self, requests: Iterable[Request]) -> list[Completion]:
        """Return the restored responses whose seed and ``request_digest`` match one of these requests.

        The seed alone is not enough: it depends on the request's position in its step, and after a resume another
        stage's prompt may have this position.
        """
        known = [(request, self._restored[request.seed]) for request in requests if request.seed in self._restored]
        same = [made for request, made in known if made.request_digest == request_digest(request)]
        if len(same) < len(known):
            log.warning(
                "%d of %d responses that were sampled before the checkpoint are sampled anew: another prompt or "
                "sampling has their seeds now, or an older version wrote them",
                len(known) - len(same),
                len(known),
            )
        return same

    def wait_decoded(self, ticket: int | None = None) -> None:
        """Block until the last response of a rollout (None: the oldest) has been sampled."""
        with span("wait", waits_for="the engines"):
            self._get(lambda manager: manager.wait_decoded.remote(self._manager_ticket(ticket)))

    def collect(self, ticket: int | None = None) -> tuple[list[Group], RolloutReport]:
        """Block until every response of a rollout has its verdict; return the groups in the order of the prompts."""
        with span("wait", waits_for="the verifiers"):
            answer = self._get(lambda manager: manager.collect.remote(self._manager_ticket(ticket)))
        groups, report = unpack(answer)
        self._manager.forget_collected.remote()  # not before: a new manager would have them sampled again
        requested = self._under_way.pop(min(self._under_way) if ticket is None else ticket)
        if not requested.urgent:
            self._collected += [made for group in groups for made in group.completions]
        self._restarts_left = self._max_restarts
        return groups, report

    def trained(self) -> None:
        """Drop the collected responses. Drop the restored ones too, unless a non-urgent rollout is under way."""
        self._collected.clear()
        if all(requested.urgent for requested in self._under_way.values()):
            self._restored.clear()  # nobody has requested the rest

    def progress(self) -> tuple[int, int]:
        """Return (responses finished, responses expected) of the oldest urgent rollout, else of the oldest rollout. If
        the manager does not answer at once, return the last known numbers."""
        try:
            self._progress = self._call("progress", timeout_s=_PROGRESS_S)
        except RolloutError:
            pass  # those who wait for the rollout get the error
        return self._progress

    def finished_responses(self) -> bytes:
        """Return the packed finished responses. If the manager does not answer, leave out the responses that only the
        manager has, so that the checkpoint can still be written. A resumed run samples these responses again."""
        finished = [*self._restored.values(), *self._collected]
        under_way = [requested for requested in self._under_way.values() if not requested.urgent]
        try:
            if under_way:
                finished += unpack(self._call("finished_responses", timeout_s=_RESPONSES_S))
        except (RolloutError, MessageDamaged) as error:
            log.warning("a checkpoint gets no finished responses: %s", error)
        seeds = {made.seed for made in finished}
        finished += [made for requested in under_way for made in requested.restored if made.seed not in seeds]
        return pack(finished) if finished else b""

    def restore_responses(self, responses: bytes, version: int | None = None) -> None:
        """Let later rollouts, except urgent ones, take these responses for equal requests instead of sampling.

        ``version``: keep only responses whose tokens were all sampled with this version of the weights. Responses that
        cannot be read are ignored. ``trained`` drops unused responses.
        """
        try:
            finished = {
                made.seed: made
                for made in unpack(responses)
                if version is None or {span.version for span in made.versions} == {version}
            }
        except Exception as error:  # written by another version, say
            log.warning("the checkpoint's finished responses cannot be read and are sampled again: %s", error)
            return
        log.info("%d responses were sampled before the checkpoint: the same requests reuse them", len(finished))
        self._restored |= finished

    def close(self) -> None:
        """End the manager and its verifiers."""
        try:
            self._call("close")
        except RolloutError:
            pass  # it is killed anyway
        ray.kill(self._manager, no_restart=True)

    def _call(self, method: str, *args: Any, timeout_s: float = _MARGIN_S) -> Any:
        """Call a method that the manager answers at once. Unlike ``_get``, this restarts no lost engine or manager."""
        try:
            return ray.get(getattr(self._manager, method).remote(*args), timeout=timeout_s)
        except RayError as error:
            raise RolloutError(f"the RolloutManager did not answer '{method}': {failure_of(error)}") from error

    def _lost_engines(self) -> Mapping[int, str]:
        try:
            lost: Mapping[int, str] = self._call("lost_engines", timeout_s=_PROGRESS_S)
        except RolloutError:
            return {}  # called again soon; the manager's own death ends the wait
        return lost

    def _manager_ticket(self, ticket: int | None) -> int | None:
        """Return the present manager's ticket of a rollout (None: the oldest); None if there is no such rollout."""
        requested = self._under_way.get(min(self._under_way, default=0) if ticket is None else ticket)
        return None if requested is None else requested.manager_ticket

    def _get(self, call: Callable[[Any], Any]) -> Any:
        """Return the answer to ``call(manager)``. While waiting for it, restart lost engines and a lost manager."""
        deadline = time.monotonic() + self._deadline_s
        while True:
            answer = call(self._manager)
            if not self._wait(answer, deadline):
                continue
            try:
                return ray.get(answer)
            except RayTaskError as error:
                raise RolloutError(str(error.cause)) from error
            except RayError as error:
                self._restart_lost_manager(failure_of(error))

    def _wait(self, call: Any, deadline: float) -> bool:
        """Wait until the call has ended. Returns False if the call must be repeated, to a new manager."""
        while not ray.wait([call], timeout=_STOP_POLL_S)[0]:
            if self._stop():
                raise Stopped("rollout abandoned: the run has been asked to stop")
            check_ray(CHECK_EVERY_S)
            if lost := self._lost_engines():
                if self._restart_engines is None:
                    died = (f"engine {index} died during the rollout: {why}" for index, why in lost.items())
                    raise RolloutError("; ".join(died))
                if self._in_turns:
                    self._replace_manager()
                    return False
                self._restart_engines()
            if time.monotonic() > deadline:
                raise RolloutError(f"the RolloutManager did not answer within {self._deadline_s:g} s")
        return True

    def _restart_lost_manager(self, reason: str) -> None:
        """Restart the lost manager, and request the rollouts under way from the new manager.

        Raises:
            RolloutError: ``allow_restarts`` was not called, or the manager was restarted too often within one rollout.
            RayLost: Ray is lost too.
        """
        if self._restart_engines is None or self._restarts_left == 0 or self._stop():
            raise RolloutError(f"the RolloutManager is lost: {reason}")
        check_ray()
        log.warning("the RolloutManager is lost and is started again: %s", reason)
        self._restarts_left -= 1
        self._on_manager_restart(reason)
        self._replace_manager()

    def _replace_manager(self) -> None:
        """Kill the manager and start a new one, which requests all responses that are not sampled yet.

        A lost manager may still run and only be unreachable. If it were not killed, it would call the engines again and
        again, because engines answer an old manager at once, with nothing.
        """
        ray.kill(self._manager, no_restart=True)
        self._number += 1
        finished = [part for engine in self._pool.handles for part in self._take_finished(engine)]
        self._manager = self._start_manager()
        if self._in_turns and self._restart_engines is not None:
            self._restart_engines()
        for rollout in self._under_way.values():
            rollout.manager_ticket = self._call("roll_out", rollout.batch, [pack(rollout.restored), *finished])
            finished = []
        if finished:  # the lost manager's last call, ``forget``, did not reach the engines
            seeds = [made.seed for part in finished for made in unpack(part)]
            for engine in self._pool.handles:
                engine.forget.remote(seeds)  # nobody waits for it

    def _start_manager(self) -> Any:
        name = "rollout-manager" + (f"-restart-{self._number}" if self._number else "")
        manager = ManagerActor.options(name=name, namespace=namespace(self._run_id)).remote(
            self._pool.handles, *self._manager_settings, self._number, self._answer_s
        )
        timeout_s = self._config.start_timeout_s or START_S
        try:
            started_call = manager.start.remote(self._run_id)
            if not wait_for([started_call], timeout_s):
                raise RolloutError(
                    f"rollout manager and verifiers were not up after {timeout_s:g} s (rollout.start_timeout_s)"
                )
            ray.get(started_call)
        except RayError as error:
            raise RolloutError(f"rollout manager and verifiers did not start: {failure_of(error)}") from error
        return manager

    def _take_finished(self, engine: Any) -> list[bytes]:
        """Make an engine abort the old manager's requests; return [its packed finished responses], or [] on failure."""
        try:
            return [ray.get(engine.switch_manager.remote(self._number), timeout=_MARGIN_S)]
        except RayError as error:
            log.warning("an engine could not give up the requests of the lost manager: %s", failure_of(error))
            return []
