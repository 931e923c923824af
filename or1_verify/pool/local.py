"""Workers of the verifier pool as child processes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from or1_verify.child_process import close_pipes, describe_exit, pack, send, start_module, unpack
from or1_verify.config import VerifyConfig
from or1_verify.pool.queue import WorkerLost
from or1_verify.types import Attempt, Verdict


class LocalWorker:
    """A ``pool.queue.Worker`` in a child process. The child dies with the thread that constructs the worker.

    The worker has one thread, which reads and writes the child's pipes, and ends when the child ends.
    """

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        setup = (config.model_dump_json(), json.dumps(sorted(abilities)))
        self._child = start_module("or1_verify.pool.pool_process", *setup, "0", str(os.getpid()))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    async def ready(self) -> None:
        await self._on_thread(self._exchange)

    async def verify(self, attempt: Attempt) -> Verdict:
        problem, response, truncated = attempt
        return Verdict(**await self._on_thread(self._exchange, (asdict(problem), response, truncated)))

    async def close(self) -> None:
        await self._on_thread(self._end)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._thread.shutdown(wait=True)  # its read ends with the child
        close_pipes(self._child)

    async def _on_thread(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._thread.submit(do, *arguments))

    def _exchange(self, message: Any = None) -> Any:
        """Send the child a message, if given, and return the next message from it."""
        try:
            if message is not None:
                send(self._child.stdin, pack(message))
            answer = unpack(self._child.stdout.readline())
        except (OSError, EOFError, ValueError) as error:
            status = self._child.poll()
            how = "its pipe broke" if status is None else describe_exit(status)
            raise WorkerLost(f"the verifier's process ended ({how}; {type(error).__name__}: {error})") from None
        if "raised" in answer:
            raise WorkerLost(answer["raised"])
        return answer

    def _end(self) -> None:
        """Close the child's input, so that the child closes its verifiers and ends. Wait until the child has ended."""
        close_pipes(self._child)
        self._child.wait()
