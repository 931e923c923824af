"""Owner of one Math-Verify child process: starts it, bounds each request in time, kills and replaces it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import or1_megatron
from or1_megatron.errors import Or1Error

_PACKAGE_PARENT = Path(or1_megatron.__file__).resolve().parent.parent
_START_TIMEOUT_S = 120.0


class MathTimeout(Or1Error):
    """The child did not answer within the limit, and was killed."""


class MathExhausted(Or1Error):
    """The child ran out of the memory that it may use, and was replaced."""


class MathCrash(Or1Error):
    """The child died by itself; the message says how."""


class MathProcess:
    """One child at a time, started when first needed and replaced when it hangs or dies. Thread-safe: one by one.

    The child ends when its input closes, so it does not outlive this process, however this process ends.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._owner_pid = os.getpid()
        self._buffer = b""

    @property
    def pid(self) -> int | None:
        """Of the child, when one runs."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the child, if none runs; its imports go on while the caller does."""
        with self._lock:
            self._launched()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait ``timeout_s`` at most. Raises MathTimeout, MathExhausted or MathCrash; the
        next call works."""
        with self._lock:
            child = self._running()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                return self._reply(child, self.timeout_s)
            except (MathTimeout, MathCrash, MathExhausted, BrokenPipeError) as error:
                crash = self._replace()
                if isinstance(error, MathTimeout | MathExhausted):
                    raise
                raise MathCrash(f"the Math-Verify process died: {crash}") from error

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        child = getattr(self, "_child", None)
        if child is not None and self._owner_pid == os.getpid() and child.poll() is None:
            child.kill()
            child.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        """The child, started if need be, after its imports."""
        child = self._launched()
        if not self._ready:
            try:
                self._reply(child, _START_TIMEOUT_S)
            except (MathTimeout, MathCrash, MathExhausted) as error:
                ending = self._stop()
                raise RuntimeError(
                    f"the Math-Verify process did not start ({error or 'no answer'}; {ending}); expected `python -m "
                    f"or1_megatron.verify.math.worker` to import math_verify within {_START_TIMEOUT_S:.0f} s"
                ) from None
            self._ready = True
        return child

    def _launched(self) -> subprocess.Popen[bytes]:
        """The child, which may still be at its imports."""
        if self._owner_pid != os.getpid():  # forked: the child and its pipes belong to the parent
            self._child, self._owner_pid = None, os.getpid()
        if self._child is None or self._child.poll() is not None:
            self._stop()
            self._child = self._start()
        return self._child

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]))
        self._ready, self._buffer = False, b""
        return subprocess.Popen(
            # -P: with -m the working directory would come first on the child's path
            [sys.executable, "-P", "-m", "or1_megatron.verify.math.worker", str(self.timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def _replace(self) -> str:
        """Kill the child and start its successor, whose imports run while the caller goes on."""
        ending = self._stop()
        self._child = self._start()
        return ending

    def _stop(self) -> str:
        child, self._child, self._ready, self._buffer = self._child, None, False, b""
        if child is None:
            return "not running"
        ending = f"exit status {child.returncode}" if child.poll() is not None else "killed"
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # an unsent request flushed into a dead child
                    pass
        return ending

    def _reply(self, child: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any]:
        assert child.stdout is not None
        deadline = time.monotonic() + limit_s
        descriptor = child.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
                raise MathTimeout(f"no answer within {limit_s} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise MathCrash("end of output")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        assert isinstance(reply, dict)
        if "exhausted" in reply:
            raise MathExhausted("no memory left")
        return reply
