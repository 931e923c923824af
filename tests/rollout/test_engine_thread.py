"""The thread around an engine, with an engine that only counts; the real one is in test_engine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

from or1_megatron.rollout.engine_thread import EngineFailed, EngineThread
from or1_megatron.runtime.heartbeat import Heartbeat


class CountingEngine:
    """Finishes one request per step; raises at request 13. Its completions are the requests' numbers.

    ``steps`` gives it leave for each step.
    """

    def __init__(self, steps: threading.Semaphore | None = None) -> None:
        self.queue: list[int] = []
        self.steps = steps or threading.Semaphore(1_000_000)
        self.threads: set[str] = set()

    @property
    def pending(self) -> int:
        return len(self.queue)

    @property
    def idle(self) -> bool:
        return not self.queue

    def submit(self, requests: list[int]) -> None:
        if -1 in requests:
            raise ValueError("negative request")
        self.queue.extend(requests)

    def abort_all(self) -> list[Any]:
        self.queue.clear()
        return []

    def step(self) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        self.steps.acquire()
        request = self.queue.pop(0)
        if request == 13:
            raise ZeroDivisionError("thirteen")
        return [request]


@pytest.fixture
def heart(tmp_path: Path) -> Heartbeat:
    return Heartbeat(tmp_path, "engine 0")


def test_harvest_of_a_running_engine_does_not_wait_for_its_end(heart: Heartbeat) -> None:
    steps = threading.Semaphore(5)
    thread = EngineThread(lambda: CountingEngine(steps), "engine 0", heart)
    started_s = time.monotonic()
    thread.call(lambda engine: engine.submit(list(range(12))))
    first = thread.harvest(PATIENCE_S)
    assert first.completions and len(first.completions) <= 5
    got, busy_s = list(first.completions), first.busy_s
    steps.release(7)
    while len(got) < 12:
        harvest = thread.harvest(PATIENCE_S)
        got += harvest.completions
        busy_s += harvest.busy_s
    assert got == list(range(12))
    assert first.busy_s < busy_s <= time.monotonic() - started_s
    assert thread.call(lambda engine: engine.threads) == {"engine 0"}


def test_empty_harvest_returns_after_its_wait(heart: Heartbeat) -> None:
    thread = EngineThread(CountingEngine, "engine 0", heart)
    start = time.monotonic()
    assert thread.harvest(0.1).completions == ()
    assert time.monotonic() - start >= 0.1


def test_error_of_a_call_belongs_to_its_caller_and_the_engine_lives_on(heart: Heartbeat) -> None:
    thread = EngineThread(CountingEngine, "engine 0", heart)
    with pytest.raises(ValueError, match="negative request"):
        thread.call(lambda engine: engine.submit([-1]))
    thread.call(lambda engine: engine.submit([1]))
    assert thread.harvest(PATIENCE_S).completions == (1,)


def test_error_while_decoding_reaches_everyone_with_name_and_traceback(heart: Heartbeat) -> None:
    thread = EngineThread(CountingEngine, "engine 3", heart)
    thread.call(lambda engine: engine.submit([13]))
    for wait in (lambda: thread.harvest(PATIENCE_S), lambda: thread.call(lambda engine: None)):
        with pytest.raises(EngineFailed, match=r"(?s)engine 3 failed.*Traceback.*ZeroDivisionError: thirteen"):
            wait()


def test_error_while_building_reaches_the_first_caller(heart: Heartbeat) -> None:
    def build() -> Any:
        raise FileNotFoundError("no such model")

    with pytest.raises(EngineFailed, match="no such model"):
        EngineThread(build, "engine 1", heart).call(lambda engine: None)


def test_who_lingers_gets_more_at_once_but_not_after_the_last(heart: Heartbeat) -> None:
    steps = threading.Semaphore(1)
    thread = EngineThread(lambda: CountingEngine(steps), "engine 0", heart)
    thread.call(lambda engine: engine.submit(list(range(12))))
    with ThreadPoolExecutor(1) as pool:
        harvest = pool.submit(thread.harvest, PATIENCE_S, PATIENCE_S)
        wait_until(lambda: thread._completions, "the first completion")
        steps.release(11)
        assert harvest.result(PATIENCE_S).completions == tuple(range(12))


def test_a_new_manager_gets_the_kept_completions_until_they_are_forgotten(heart: Heartbeat) -> None:
    """With those that nobody has harvested; a harvest under way ends with nothing, and what is pending is given up."""
    steps = threading.Semaphore(3)
    thread = EngineThread(lambda: CountingEngine(steps), "engine 0", heart)
    done = [SimpleNamespace(seed=seed) for seed in range(5)]
    thread.call(lambda engine: engine.submit(done[:3]))
    harvested: list[Any] = []
    while len(harvested) < 2:
        harvested += thread.harvest(PATIENCE_S, keep=True).completions
    wait_until(lambda: len(thread._completions) + len(harvested) == 3, "the engine to finish")
    asked: list[Any] = []
    caller = threading.Thread(target=lambda: asked.append(thread.harvest(PATIENCE_S)))
    thread.harvest(0.0, keep=True)
    caller.start()
    wait_until(lambda: bool(vars(thread._state)["_waiters"]), "the harvest to wait")
    assert thread.switch_manager(1) == done[:3]
    caller.join(PATIENCE_S)
    assert asked[0].completions == ()
    thread.forget([0, 2])
    steps.release(3)
    thread.call_for(1, lambda engine: engine.submit(done[3:]), None)
    wait_until(lambda: len(thread._completions) == 2, "the engine to finish")
    assert thread.switch_manager(2) == [done[1], *done[3:]]
    assert thread.harvest(0.01, caller=2).completions == ()


def test_calls_of_an_old_manager_that_arrive_late_do_nothing(heart: Heartbeat) -> None:
    """Its requests are not decoded, and what its successor's requests give is left to the successor."""
    thread = EngineThread(CountingEngine, "engine 0", heart)
    assert thread.switch_manager(1) == []
    assert thread.call_for(0, lambda engine: engine.submit([7]), "ignored") == "ignored"
    thread.call_for(1, lambda engine: engine.submit([8]), None)
    wait_until(lambda: bool(thread._completions), "the successor's request")
    assert thread.harvest(PATIENCE_S, caller=0).completions == ()
    assert thread.harvest(PATIENCE_S, caller=1).completions == (8,)
