"""Runs Python modules of ours as child processes with a time limit, and replaces them when they hang or die.

``serve`` runs in the child, ``ChildProcess`` in the parent. Requests and answers are lines: a CRC-32, then a message as
JSON. The child first writes {} when it is ready, or {"raised": words} if it cannot start. It answers each request
with a reply, with {"raised": words}, or with {"exhausted": bytes} if its memory has run out. The child ends after
{"exhausted": bytes}, and when its input ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from or1_verify.errors import Or1Error
from or1_verify.types import VerdictStatus

_PACKAGE_PARENT = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S = 120.0
_GRACE_S = 4.0
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class ChildLimit(Or1Error):
    """A child process met a limit of time or memory and was replaced. The message names the limit."""


class ChildDied(Or1Error):
    """A child process died and was replaced; the message says how it died."""


class ChildUnusable(Or1Error):
    """A child process did not start; the message says why."""


def start_module(module: str, *arguments: str, path: Sequence[str] = (), stderr: int | None = None) -> Any:
    """Start ``python -m module`` with pipes to its standard input and output, and return the Popen object.

    The child imports this package from the same folder as this process, and other modules from ``path`` and PYTHONPATH.
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
    for pipe in (child.stdin, child.stdout):
        try:
            pipe.close()
        except OSError:  # an unsent request flushed into a dead child
            pass


def describe_exit(status: int) -> str:
    """Return an exit status in words. After a death by signal n the status is -n (Popen) or 128 + n (shells)."""
    number = -status if status < 0 else status - 128
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exit status {status}"


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent dies, so that no process outlives a killed run.

    Call this first in the child. ``parent_pid`` is the pid of the process that started the child; if the parent has
    died already, this process ends at once. The kernel watches the parent *thread* that started this process, so that
    thread must live as long as the parent. Raises OSError on systems other than Linux.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise OSError("die_with_parent needs prctl of Linux, which this system lacks")
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(int(sig)), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG, {sig.name}): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)


def pack(message: Any) -> bytes:
    """Return the line that carries a message. Raises TypeError if the message is not JSON-able."""
    content = json.dumps(message).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def send(pipe: BinaryIO, line: bytes) -> None:
    pipe.write(line)
    pipe.flush()


def unpack(line: bytes) -> Any:
    """Return the message in a line. Raises EOFError if the line has no end, ValueError if its CRC-32 does not fit."""
    if not line.endswith(b"\n"):
        raise EOFError("the other end is gone")
    if line[:8] != b"%08x" % zlib.crc32(line[9:-1]):
        raise ValueError(
            f"a message of {len(line)} bytes arrived with other bits than it was sent with: look at the memory"
        )
    return json.loads(line[9:-1])


def serve(make: Callable[[], Callable[[Any], Any]], memory_bytes: int | None = None) -> None:
    """Serve requests in the child: call ``make`` once, then call the function that ``make`` returned on each request.

    The last two arguments of the process are the time limit of a request (0: none) and the pid of the parent for
    ``die_with_parent`` (0: none). ``memory_bytes`` limits the address space.

    A request with a time limit sets a timer whose signal kills this process. So a child in one endless operation ends
    soon after its limit, even if no parent is left to kill it. (Python's signal handlers and threads do not run during
    such an operation, and a child that a thread started cannot die with its parent.)
    """
    timeout_s, parent = float(sys.argv[-2]), int(sys.argv[-1])
    if parent:
        die_with_parent(parent)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a verifier prints must not look like a reply
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes our input
    try:
        try:
            answer = make()
        except Exception as error:  # of a user's module, too
            send(replies, pack({"raised": f"{type(error).__name__}: {error}"}))
            return
        send(replies, pack({}))
        for line in requests:
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S if timeout_s else 0)
            try:
                reply = pack(answer(unpack(line)))
            except Exception as error:
                if memory_bytes and isinstance(error, MemoryError):
                    send(replies, pack({"exhausted": memory_bytes}))
                    return  # a fresh process works better than one whose memory has run out
                reply = pack({"raised": f"{type(error).__name__}: {error}"[:1000]})
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(replies, reply)
    except BrokenPipeError:  # the parent is gone
        return


class ChildProcess:
    """Keeps one child process, whose module calls ``serve``, and sends it one request at a time; thread-safe."""

    def __init__(
        self, module: str, *arguments: str, timeout_s: float, path: Sequence[str] = (), stderr: int | None = None
    ) -> None:
        self._module, self._timeout_s = module, timeout_s
        arguments = (*arguments, str(timeout_s))
        self._start = lambda parent: start_module(module, *arguments, str(parent), path=path, stderr=stderr)
        self._lock = threading.Lock()
        self._child: Any = None
        self._ready = False
        self._owner_pid = os.getpid()
        self._buffer = b""

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self, wait: bool = False) -> None:
        """Start a child if none runs; with ``wait``, return only when it is ready.

        Raises ChildUnusable if ``wait`` is set and the child does not start.
        """
        with self._lock:
            self._launch()
            if wait:
                self._wait_until_ready()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the answer. After ChildLimit or ChildDied a new child is started at once.

        Raises:
            ChildLimit: no answer came within ``timeout_s``, or the child is out of memory.
            ChildDied: the child died, or its answer was damaged.
            ChildUnusable: no child starts.
        """
        with self._lock:
            self._launch()
            self._wait_until_ready()
            try:
                send(self._child.stdin, pack(request))
                reply = self._reply(self._timeout_s)
                if "exhausted" in reply:
                    raise ChildLimit(f"more memory than the {reply['exhausted'] >> 30} GiB that it may use")
                return reply
            except (ChildLimit, ChildDied, BrokenPipeError) as error:
                ending = self._stop()
                self._launch()
                if isinstance(error, ChildLimit):
                    raise
                raise ChildDied(f"its process died: {ending}") from None

    def judge(self, request: dict[str, Any]) -> tuple[VerdictStatus, str, str]:
        """Return (status, answer, detail) of the verdict that the child gives on a request."""
        reply = self.verdict(request)
        return reply["status"], reply["answer"], reply["detail"]

    def verdict(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the child's verdict. If the child fails, the status is ``timeout`` or ``error``."""
        try:
            reply = self.ask(request)
        except ChildLimit as error:
            return {"status": "timeout", "answer": "", "detail": str(error)}
        except ChildDied as error:
            reply = {"raised": str(error)}
        return {"status": "error", "answer": "", "detail": reply["raised"]} if "raised" in reply else reply

    def close(self) -> None:
        """End the child; a later request starts a new one."""
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
        except (ChildLimit, ChildDied) as error:
            reply = {"raised": f"`python -m {self._module}` did not start: {error}; {self._stop()}"}
        if "raised" in reply:
            self._stop()
            raise ChildUnusable(reply["raised"])
        self._ready = True

    def _stop(self) -> str:
        """End the child, and return in words how it ended."""
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
                raise ChildLimit(f"no answer within {limit_s:g} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise ChildDied("it ended")
            self._buffer += chunk
        line, end, self._buffer = self._buffer.partition(b"\n")
        try:
            reply: dict[str, Any] = unpack(line + end)
        except ValueError as error:
            raise ChildDied(str(error)) from None
        return reply
