"""vLLM's own queue between two threads; not shown: how many cores it leaves to others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import PATIENCE_S

from or1_megatron.rollout.engine import wait_without_spinning


def test_a_reader_sleeps_between_polls_and_gets_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is sent when the reader has polled in vain five times."""
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)  # put back afterwards
    wait_without_spinning()
    sleep = shm_broadcast.sched_yield
    slept_s: list[float] = []
    polled = threading.Semaphore(0)

    def poll() -> None:
        start = time.perf_counter()
        sleep()
        slept_s.append(time.perf_counter() - start)
        polled.release()

    def send_late(number: int) -> None:
        for _ in range(5):
            polled.acquire(timeout=PATIENCE_S)
        writer.enqueue(number)

    monkeypatch.setattr(shm_broadcast, "sched_yield", poll)
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(2) as pool:
        for ready in [pool.submit(end.wait_until_ready) for end in (writer, reader)]:
            ready.result(PATIENCE_S)
        for number in range(20):
            sent = pool.submit(send_late, number)
            assert reader.dequeue(timeout=PATIENCE_S) == number
            sent.result(PATIENCE_S)
    assert len(slept_s) >= 20 * 5 and min(slept_s) >= 0.001
