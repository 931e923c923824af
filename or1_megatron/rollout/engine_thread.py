"""Runs an engine on one thread, which steps the engine and executes all calls to it, one after another."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from or1_megatron.runtime.heartbeat import BEAT_S, Heartbeat
from or1_megatron.runtime.timeline import span
from or1_megatron.types import Completion
from or1_verify.errors import UserError

T = TypeVar("T")

LINGER_S = 0.03
"""Finished responses wait this long for further responses, to share a call, unless the engine has no more work."""


class EngineFailed(UserError, RuntimeError):
    """The engine raised an error while decoding and cannot continue. The message contains the traceback."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """An engine's completions since the last harvest, and the seconds that the engine's steps took since then."""

    completions: tuple[Completion, ...]
    busy_s: float


class EngineThread:
    """Steps an engine whenever it has work, and between steps runs the calls that other threads have queued."""

    def __init__(self, build: Callable[[], Any], name: str, heart: Heartbeat) -> None:
        """``build``: makes the engine, on the thread. ``name``: for errors. ``heart``: advanced at each iteration."""
        self._build = build
        self._name = name
        self._heart = heart
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._completions: list[Completion] = []
        self._kept: dict[int, Completion] = {}  # harvested, and not yet forgotten; by seed
        self._busy_s = 0.0  # since the last harvest
        self._is_dry = True  # the last step left nothing to do
        self._caller = 0
        self.failure: str | None = None
        """The error that ended the engine, with its traceback; None while it runs."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[Any], T]) -> T:
        """Run ``function(engine)`` on the thread between two steps. Returns the result, or raises the exception.

        Raises:
            EngineFailed: the engine has failed.
        """
        future: Future[T] = Future()
        with self._state:
            if self.failure is not None:
                raise EngineFailed(self.failure)
            self._calls.put((function, future))
        return future.result()

    def call_for(self, caller: int, function: Callable[[Any], T], otherwise: T) -> T:
        """Run ``call(function)`` for manager number ``caller``; return ``otherwise`` if a new one has replaced it."""
        return self.call(lambda engine: otherwise if caller < self._caller else function(engine))

    def harvest(self, wait_s: float, linger_s: float = LINGER_S, keep: bool = False, caller: int = 0) -> Harvest:
        """Return the finished completions; an empty Harvest when no completion comes within ``wait_s``.

        Args:
            linger_s: how long to wait for further completions after the first.
            keep: keep the completions until ``forget``, so that ``switch_manager`` returns them again.
            caller: the number of the calling manager. A manager that a new one has replaced gets no completions.

        Raises:
            EngineFailed: the engine has failed.
        """
        with self._state:
            self._state.wait_for(
                lambda: self._completions or self.failure is not None or caller < self._caller, timeout=wait_s
            )
            if caller < self._caller:
                return Harvest((), 0.0)
            if self._completions:
                self._state.wait_for(lambda: self._is_dry or self.failure is not None, timeout=linger_s)
            if self.failure is not None:
                raise EngineFailed(self.failure)
            harvest = Harvest(tuple(self._completions), self._busy_s)
            self._completions, self._busy_s = [], 0.0
            if keep:
                self._kept.update((completion.seed, completion) for completion in harvest.completions)
            return harvest

    def switch_manager(self, caller: int) -> list[Completion]:
        """Abort the old manager's requests, and return all finished completions that ``forget`` has not dropped.

        Args:
            caller: the new manager's number, which is larger than the old manager's. Calls of the old manager that are
                still on their way do nothing from now on.

        Raises:
            EngineFailed: the engine has failed.
        """
        with self._state:
            self._caller = caller
            self._state.notify_all()
        finished = self.call(lambda engine: engine.abort_all())
        with self._state:
            for completion in (*self._completions, *finished):
                self._kept[completion.seed] = completion
            self._completions, self._busy_s = [], 0.0
            return list(self._kept.values())

    def forget(self, seeds: Iterable[int]) -> None:
        """Drop kept completions that no manager will need again."""
        with self._state:
            for seed in seeds:
                self._kept.pop(seed, None)

    def _run(self) -> None:
        try:
            engine = self._build()
            starts = True  # until the first step has ended, which may take long, because vLLM may compile kernels
            while True:
                self._heart.worked()
                self._serve_calls(engine, block=engine.idle)
                if not engine.idle:
                    started_s = time.monotonic()
                    completions = engine.step()
                    if starts:
                        starts = False
                        self._heart.says("decoding, or waiting for requests")
                    self._store(completions, time.monotonic() - started_s, is_dry=engine.pending == 0)
        except BaseException:  # the callers that wait get any
            self._fail(f"{self._name} failed:\n{traceback.format_exc()}")

    def _serve_calls(self, engine: Any, block: bool) -> None:
        """Run the queued calls. With ``block``, wait up to ``BEAT_S`` for the first call."""
        while block or not self._calls.empty():
            try:
                with span("wait", waits_for="requests or weights"):
                    function, future = self._calls.get(timeout=BEAT_S)
            except queue.Empty:
                return
            block = False
            with self._heart.busy_with("answering a call, such as a handoff"):
                try:
                    future.set_result(function(engine))
                except Exception as error:  # the caller's; the engine goes on
                    future.set_exception(error)

    def _store(self, completions: list[Completion], busy_s: float, is_dry: bool) -> None:
        with self._state:
            self._busy_s += busy_s
            self._is_dry = is_dry
            if completions:
                self._completions.extend(completions)
                self._state.notify_all()

    def _fail(self, failure: str) -> None:
        with self._state:
            self.failure = failure
            self._state.notify_all()
            while not self._calls.empty():
                self._calls.get()[1].set_exception(EngineFailed(failure))
