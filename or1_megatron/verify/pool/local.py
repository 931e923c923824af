"""The pool's workers as processes of this machine: no Ray, and up in the time that Python's imports take."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import or1_megatron
from or1_megatron.config.schema import VerifyConfig
from or1_megatron.verify.pool.queue import WorkerLost
from or1_megatron.verify.pool.worker import Claim, Judged, receive, send

_PACKAGE_PARENT = Path(or1_megatron.__file__).resolve().parent.parent


class LocalWorker:
    """``pool.queue.Worker`` over a child process, which starts here and dies with the thread that makes it.

    Its pipes are read on a thread of its own, which ends when the child does.
    """

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]))
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "or1_megatron.verify.pool.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self._setup = (config, abilities, os.getpid())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    async def ready(self) -> None:
        await self._on_thread(self._exchange, self._setup)

    async def verify_batch(self, claims: Sequence[Claim]) -> Judged:
        judged: Judged = await self._on_thread(self._exchange, list(claims))
        return judged

    async def close(self) -> None:
        await self._on_thread(self._end)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._thread.shutdown(wait=True)  # its read ends with the child
        self._close_pipes()

    async def _on_thread(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._thread.submit(do, *arguments))

    def _exchange(self, message: Any) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            send(self._child.stdin, message)  # type: ignore[arg-type]
            answer = receive(self._child.stdout)  # type: ignore[arg-type]
        except (OSError, EOFError, ValueError) as error:
            status = self._child.poll()
            how = "its pipe broke" if status is None else f"exit status {status}"
            raise WorkerLost(f"the verifier's process ended ({how}; {type(error).__name__})") from None
        if isinstance(answer, Exception):
            raise WorkerLost(str(answer))
        return answer

    def _end(self) -> None:
        """The end of its input; it closes its verifiers."""
        self._close_pipes()
        self._child.wait()

    def _close_pipes(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # an unsent batch flushed into a dead child
                pass


def local_workers(config: VerifyConfig, abilities: frozenset[str]) -> Callable[[], LocalWorker]:
    """For ``VerifierPool``: what makes its workers."""
    return lambda: LocalWorker(config, abilities)
