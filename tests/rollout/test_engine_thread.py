"""The thread around an engine, with an engine that only counts; the real one is in test_engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from or1_megatron.rollout.engine_thread import EngineFailed, EngineThread


class CountingEngine:
    """Finishes one request per step; raises at request 13. Its completions are the requests' numbers."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.queue: list[int] = []
        self.step_s = step_s
        self.threads: set[str] = set()

    @property
    def pending(self) -> int:
        return len(self.queue)

    @property
    def idle(self) -> bool:
        return not self.queue

    def submit(self, requests: list[int]) -> None:
        if min(requests) < 0:
            raise ValueError("negative request")
        self.queue.extend(requests)

    def step(self) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.step_s)
        request = self.queue.pop(0)
        if request == 13:
            raise ZeroDivisionError("thirteen")
        return [request]


def test_harvest_of_a_running_engine_does_not_wait_for_its_end() -> None:
    thread = EngineThread(lambda: CountingEngine(step_s=0.02), "engine 0")
    thread.call(lambda engine: engine.submit(list(range(12))))
    start = time.time()
    first = thread.harvest(5.0)
    assert first.completions and len(first.completions) < 12
    assert first.busy_s == ()  # the stretch has not ended
    got = list(first.completions)
    busy: list[tuple[float, float]] = []
    while len(got) < 12:
        harvest = thread.harvest(5.0)
        got += harvest.completions
        busy += harvest.busy_s
    assert got == list(range(12))
    assert len(busy) == 1
    assert 12 * 0.02 <= busy[0][1] - busy[0][0] < 12 * 0.02 + 1.0
    assert time.time() - start < 2.0
    assert thread.call(lambda engine: engine.threads) == {"engine 0"}


def test_what_a_call_aborts_ends_the_stretch() -> None:
    thread = EngineThread(lambda: CountingEngine(step_s=0.01), "engine 0")
    thread.call(lambda engine: engine.submit(list(range(100, 1100))))
    thread.harvest(5.0)
    thread.call(lambda engine: engine.queue.clear())
    busy: list[tuple[float, float]] = []
    while not busy:
        busy += thread.harvest(5.0).busy_s
    assert len(busy) == 1 and busy[0][1] <= time.time()


def test_empty_harvest_returns_after_its_wait() -> None:
    thread = EngineThread(CountingEngine, "engine 0")
    start = time.monotonic()
    assert thread.harvest(0.1).completions == ()
    assert 0.1 <= time.monotonic() - start < 2.0


def test_error_of_a_call_belongs_to_its_caller_and_the_engine_lives_on() -> None:
    thread = EngineThread(CountingEngine, "engine 0")
    with pytest.raises(ValueError, match="negative request"):
        thread.call(lambda engine: engine.submit([-1]))
    thread.call(lambda engine: engine.submit([1]))
    assert thread.harvest(5.0).completions == (1,)


def test_error_while_decoding_reaches_everyone_with_name_and_traceback() -> None:
    thread = EngineThread(CountingEngine, "engine 3")
    thread.call(lambda engine: engine.submit([13]))
    for wait in (lambda: thread.harvest(5.0), lambda: thread.call(lambda engine: None)):
        with pytest.raises(EngineFailed, match=r"(?s)engine 3 failed.*Traceback.*ZeroDivisionError: thirteen"):
            wait()


def test_error_while_building_reaches_the_first_caller() -> None:
    def build() -> Any:
        raise FileNotFoundError("no such model")

    with pytest.raises(EngineFailed, match="no such model"):
        EngineThread(build, "engine 1").call(lambda engine: None)


def test_who_lingers_gets_more_at_once_but_not_after_the_last() -> None:
    thread = EngineThread(lambda: CountingEngine(step_s=0.02), "engine 0")
    thread.call(lambda engine: engine.submit(list(range(12))))
    assert thread.harvest(5.0, linger_s=60.0).completions == tuple(range(12))
