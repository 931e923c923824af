"""How vLLM's processes wait for each other's messages where cores are few.

Under tensor parallelism an engine talks to its workers through queues in shared memory, whose readers spin for a second
after every message. Where each process has a core to itself that saves microseconds. On CPU the cores that spin are
those that others compute with: the second in which a worker waits for the next call is the one in which the trainer
packs weights for it.

vLLM's other way of waiting, for a notification, is no substitute for spinning: with many messages in short succession
some notifications are dropped, and the reader sleeps until its time runs out, 5 s later.
"""

from __future__ import annotations

import time

_NAP_S = 0.001


def wait_without_spinning() -> None:
    """Let this process's waits for a message be naps instead of a spin, on CPU."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(_NAP_S)
