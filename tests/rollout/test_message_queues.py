"""vLLM's own queue between two threads; how many cores it leaves to others is for benchmarks/handoff.py to show."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from or1_megatron.rollout.message_queues import wait_without_spinning


def test_reader_sleeps_once_it_has_been_heard_of_and_is_woken() -> None:
    wait_without_spinning()
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(2) as pool:
        for ready in [pool.submit(end.wait_until_ready) for end in (writer, reader)]:
            ready.result(30)
    assert reader._spin_condition.busy_loop_s > 0
    writer.enqueue("first")
    assert reader.dequeue(timeout=30) == "first"
    assert reader._spin_condition.busy_loop_s == 0
    for number in range(20):
        late = threading.Thread(target=lambda number=number: (time.sleep(0.01), writer.enqueue(number)))
        late.start()
        assert reader.dequeue(timeout=30) == number
        late.join()
