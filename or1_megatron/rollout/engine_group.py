"""Calls all engines at once, and detects lost engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from or1_megatron.interfaces import EnginesLost
from or1_megatron.rollout.cluster import wait_for
from or1_megatron.rollout.ray_errors import failure_of
from or1_megatron.runtime.world import several_nodes
from or1_megatron.types import Float32Array, Int32Array

_ANSWER_S = 20.0  # the actor of an engine that runs answers at once, whatever the engine does


class EngineError(EnginesLost):
    """An engine did not start, failed, died or did not answer. The message names the engine."""


class EngineGroup:
    """Controls the engines, for trainer rank 0. A call goes to all at once, and returns when all have answered."""

    def __init__(self, handles: Sequence[Any], workers_per_engine: int, timeout_s: float) -> None:
        """``handles``: the engines' actors. The list may change; each call goes to the list's present handles."""
        self.engines = len(handles)
        self.workers_per_engine = workers_per_engine
        self._handles = handles
        self._timeout_s = timeout_s

    @property
    def address(self) -> str:
        """Return the address at which the nodes of the engines and of the other trainer ranks reach this host."""
        nodes = gather([handle.ready.remote() for handle in self._handles], self._timeout_s, "tell its node")
        alone = not several_nodes() and set(nodes) == {ray.get_runtime_context().get_node_id()}
        return "127.0.0.1" if alone else str(ray.util.get_node_ip_address())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, version: int) -> None:
        self._call("finish_weight_update", version)

    def score_prompts(self, token_ids: Sequence[Int32Array]) -> list[list[Float32Array]]:
        return self._call("score_prompts", list(token_ids))

    def resume_generation(self, version: int) -> None:
        """Let the engines decode with their weights, which the trainer has checked to be ``version``."""
        self._call("resume_generation", version)

    def sleep(self) -> None:
        self._call("sleep")

    def wake_up(self, tags: Sequence[str]) -> None:
        self._call("wake_up", list(tags))

    def _call(self, method: str, *args: Any) -> list[Any]:
        return gather([handle.call.remote(method, *args) for handle in self._handles], self._timeout_s, method)


def find_lost_engines(handles: Sequence[Any]) -> dict[int, str]:
    """Return, by index, why each lost engine is lost: it failed, died, or gives no answer for ``_ANSWER_S`` seconds."""
    calls = [handle.failure.remote() for handle in handles]
    ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S)
    lost = {}
    for index, call in enumerate(calls):
        try:
            reason = ray.get(call, timeout=0)
        except GetTimeoutError:
            reason = f"its process does not answer within {_ANSWER_S:g} s"
        except RayError as error:
            reason = failure_of(error)
        if reason is not None:
            lost[index] = reason
    return lost


def gather(calls: Sequence[Any], timeout_s: float, what: str, deadline_of: str = "") -> list[Any]:
    """Return the results of one call per engine, in the engines' order. The first error ends the wait.

    For error messages, ``what`` says what the engines should do, and ``deadline_of`` which setting gave the deadline.

    Raises:
        EngineError: an engine raised, died or took longer than ``timeout_s``.
        RayLost: Ray was lost before an answer came.
    """
    order = {call: index for index, call in enumerate(calls)}
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(order):
        waiting = [call for call, index in order.items() if index not in results]
        done = wait_for(waiting, deadline - time.monotonic())
        if not done:
            names = ", ".join(f"engine {order[call]}" for call in waiting)
            raise EngineError(
                f"{names} did not {what} within {timeout_s:.0f} s" + f" ({deadline_of})" * bool(deadline_of)
            )
        for call in done:
            results[order[call]] = result_of(call, order[call], what, timeout_s=0)
    return [results[index] for index in range(len(order))]


def result_of(call: Any, index: int, what: str, timeout_s: float | None = None) -> Any:
    """Return the result of one engine's call.

    Raises:
        EngineError: the engine raised or died.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except GetTimeoutError as error:  # reported done a moment ago: its node went away
        raise EngineError(f"engine {index}: the answer to {what} was lost with its node") from error
    except RayError as error:
        raise EngineError(f"engine {index} did not {what}: {failure_of(error)}") from error
