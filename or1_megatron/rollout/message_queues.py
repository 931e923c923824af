"""How vLLM's processes wait for each other's messages where cores are few.

Under tensor parallelism an engine talks to its workers through queues in shared memory, whose readers spin for a second
after every message. Where each process has a core to itself that saves microseconds. On CPU the cores that spin are
those that others compute with: the second in which a worker waits for the next call is the one in which the trainer
packs weights for it.
"""

from __future__ import annotations

from typing import Any


def wait_without_spinning() -> None:
    """Let this process's readers sleep until they are told of a message, on CPU; call before the queues are made.

    Before its first message a reader spins all the same, as long as vLLM has it: it may not have been heard of yet.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        SpinCondition.record_read = _read_once


def _read_once(condition: Any) -> None:
    condition.busy_loop_s = 0.0
