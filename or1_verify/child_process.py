"""Runs our Python modules as child processes, which are bounded in time and replaced when they hang or die."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from or1_verify.errors import Or1Error

_PACKAGE_PARENT = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class ChildTimeout(Or1Error):
    """The child did not answer within the limit, and was replaced."""


class ChildDied(Or1Error):
    """The child died, and was replaced. The message says how it ended."""


class ChildUnusable(Or1Error):
    """The child did not start. The message says why."""


def start_module(module: str, *arguments: str, path: Sequence[str] = (), stderr: int | None = None) -> Any:
    """Start ``python -m module`` with pipes to its standard input and output. Returns the Popen object.

    The child imports this package from the folder that we have it from; then it looks in ``path`` and in PYTHONPATH.
    """
    folders = [str(_PACKAGE_PARENT), *path, os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        # -P: with -m the working directory would come first on the child's path
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"},
    )


def close_pipes(child: Any) -> None:
    """Close our ends of a child's pipes."""
    for pipe in (child.stdin, child.stdout):
        try:
            pipe.close()
        except OSError:  # an unsent request flushed into a dead child
            pass


def describe_exit(status: int) -> str:
    """Say in words what an exit status means; for signal n it is -n (Popen) or 128 + n (shells)."""
    number = -status if status < 0 else status - 128
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exit status {status}"


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent dies, so that nothing outlives a killed run.

    Call it first in the child, with the pid that the parent had at the start: if the parent has died already, this
    process ends at once. The kernel watches the parent *thread* that started this process, so that thread must live as
    long as the parent. Raises OSError on systems other than Linux.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise OSError("die_with_parent needs prctl of Linux, which this system lacks")
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(int(sig)), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG, {sig.name}): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)


class ChildProcess:
    """One child at a time, which answers JSON objects, one per line. Thread-safe: one request at a time.

    The child's first line is {} when it is ready, or {"raised": words}. The child must end when its input closes. Its
    last argument is our pid, for ``die_with_parent``; 0 when a thread starts the child, lest it die with the thread.
    """

    def __init__(
        self, module: str, *arguments: str, timeout_s: float, path: Sequence[str] = (), stderr: int | None = None
    ) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._start = lambda parent: start_module(module, *arguments, str(parent), path=path, stderr=stderr)
        self._lock = threading.Lock()
        self._child: Any = None
        self._ready = False
        self._owner_pid = os.getpid()
        self._buffer = b""

    @property
    def pid(self) -> int | None:
        """The child's process id, when one runs."""
        return None if self._child is None else self._child.pid

    def start(self, wait: bool = False) -> None:
        """Start the child, if none runs. ``wait``: return when the child is ready; else return while it imports.

        Raises ChildUnusable when ``wait`` is set and the child does not start.
        """
        with self._lock:
            self._launch()
            if wait:
                self._wait_until_ready()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the answer.

        Raises ChildTimeout after ``timeout_s``, or ChildDied; the child's successor starts at once, so the next request
        works. Raises ChildUnusable when no child starts.
        """
        with self._lock:
            self._launch()
            self._wait_until_ready()
            try:
                self._child.stdin.write(json.dumps(request).encode() + b"\n")
                self._child.stdin.flush()
                return self._reply(self._timeout_s)
            except (ChildTimeout, ChildDied, BrokenPipeError) as error:
                ending = self._stop()
                self._launch()
                if isinstance(error, ChildTimeout):
                    raise
                raise ChildDied(f"its process died: {ending}") from None

    def close(self) -> None:
        """End the child. The next request starts another."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None and self._owner_pid == os.getpid():
            self._stop()

    def _launch(self) -> None:
        if self._owner_pid != os.getpid():  # forked: the child and its pipes belong to the parent
            self._child, self._owner_pid = None, os.getpid()
        if self._child is None or self._child.poll() is not None:
            self._stop()
            in_main_thread = threading.current_thread() is threading.main_thread()
            self._child = self._start(os.getpid() if in_main_thread else 0)

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            reply = self._reply(_START_TIMEOUT_S)
        except (ChildTimeout, ChildDied) as error:
            reply = {"raised": f"`python -m {self._module}` did not start: {error}; {self._stop()}"}
        if "raised" in reply:
            self._stop()
            raise ChildUnusable(reply["raised"])
        self._ready = True

    def _stop(self) -> str:
        """End the child. Returns in words how it ended."""
        child, self._child, self._ready, self._buffer = self._child, None, False, b""
        if child is None:
            return "not running"
        ending = "killed" if child.poll() is None else describe_exit(child.returncode)
        child.kill()
        child.wait()
        close_pipes(child)
        return ending

    def _reply(self, limit_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + limit_s
        descriptor = self._child.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
                raise ChildTimeout(f"no answer within {limit_s:g} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise ChildDied("it ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply
