"""vLLM's own queue between two threads; how many cores it leaves to others is for benchmarks/handoff.py to show."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from or1_megatron.rollout.engine import wait_without_spinning


def test_a_reader_naps_and_gets_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)  # put back afterwards
    wait_without_spinning()
    naps = []
    nap = shm_broadcast.sched_yield
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: (naps.append(1), nap()))
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(2) as pool:
        for ready in [pool.submit(end.wait_until_ready) for end in (writer, reader)]:
            ready.result(30)
    for number in range(20):
        late = threading.Thread(target=lambda number=number: (time.sleep(0.05), writer.enqueue(number)))
        late.start()
        assert reader.dequeue(timeout=30) == number
        late.join()
    assert 0 < len(naps) <= 20 * 0.05 / 0.001 + 200  # a spin makes hundreds of thousands
