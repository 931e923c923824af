"""The thread that owns an engine: everything that touches the engine happens on it, one thing after another."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from or1_megatron.errors import UserError
from or1_megatron.types import Completion

T = TypeVar("T")

# Finished responses are handed out together, not one call each; an engine that runs dry does not linger.
LINGER_S = 0.03


class EngineFailed(UserError, RuntimeError):
    """The engine raised while decoding and cannot go on; the message holds its traceback."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """What an engine has brought forth since the last harvest."""

    completions: tuple[Completion, ...]
    busy_s: tuple[tuple[float, float], ...]
    """(start, end), seconds since the epoch: stretches during which the engine had work, each ended by running dry."""


class EngineThread:
    """Steps an engine whenever it has work; between steps runs the calls that others have asked for."""

    def __init__(self, build: Callable[[], Any], name: str) -> None:
        """``build`` makes the engine, on the thread; ``name`` stands in errors."""
        self._build = build
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._completions: list[Completion] = []
        self._busy_s: list[tuple[float, float]] = []
        self._busy_since_s: float | None = None
        self._failure: str | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[Any], T]) -> T:
        """Run ``function(engine)`` on the thread, between two steps; its result or exception.

        Raises:
            EngineFailed: the engine is not there any more.
        """
        future: Future[T] = Future()
        with self._state:
            if self._failure is not None:
                raise EngineFailed(self._failure)
            self._calls.put((function, future))
        return future.result()

    @property
    def failure(self) -> str | None:
        """What ended the engine; None as long as it is there."""
        return self._failure

    def harvest(self, wait_s: float, linger_s: float = LINGER_S) -> Harvest:
        """Finished completions; waits up to ``wait_s`` for the first, and returns empty-handed after that.

        ``linger_s``: how long to wait for more, once the first is there.

        Raises:
            EngineFailed: the engine is not there any more.
        """
        with self._state:
            self._state.wait_for(lambda: self._completions or self._busy_s or self._failure is not None, timeout=wait_s)
            if self._completions:
                self._state.wait_for(lambda: self._busy_since_s is None or self._failure is not None, timeout=linger_s)
            if self._failure is not None:
                raise EngineFailed(self._failure)
            harvest = Harvest(tuple(self._completions), tuple(self._busy_s))
            self._completions, self._busy_s = [], []
            return harvest

    def _run(self) -> None:
        try:
            engine = self._build()
            while True:
                if engine.idle:
                    self._stop_clock()  # with requests pending, when it waits for weights
                self._serve_calls(engine, block=engine.idle)
                if not engine.idle:
                    if self._busy_since_s is None:
                        self._busy_since_s = time.time()
                    self._store(engine.step(), dry=engine.pending == 0)
        except BaseException:  # whatever it is, those who wait must hear of it
            self._fail(f"{self._name} failed:\n{traceback.format_exc()}")

    def _serve_calls(self, engine: Any, block: bool) -> None:
        """Run what has been asked for; with ``block`` wait for at least one."""
        while True:
            try:
                function, future = self._calls.get(block=block)
            except queue.Empty:
                return
            block = False
            try:
                future.set_result(function(engine))
            except Exception as error:  # the caller's; the engine stands as the call has left it
                future.set_exception(error)

    def _store(self, completions: list[Completion], dry: bool) -> None:
        if not completions and not (dry and self._busy_since_s is not None):
            return
        with self._state:
            self._completions.extend(completions)
            if dry:
                self._stop_clock()
            self._state.notify_all()

    def _stop_clock(self) -> None:
        with self._state:
            if self._busy_since_s is not None:
                self._busy_s.append((self._busy_since_s, time.time()))
                self._busy_since_s = None
                self._state.notify_all()

    def _fail(self, failure: str) -> None:
        with self._state:
            self._failure = failure
            self._state.notify_all()
            while not self._calls.empty():
                self._calls.get()[1].set_exception(EngineFailed(failure))
