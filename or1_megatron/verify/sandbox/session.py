"""A program that stays in its sandbox and is talked to: one line in, one line out.

Its time is bounded by each ``ask`` and by its CPU limit, its memory as that of any run. What a session has started ends
with ``close``; it is a context manager.
"""

from __future__ import annotations

import os
import selectors
import time
from types import TracebackType

from or1_megatron.errors import Or1Error
from or1_megatron.verify.sandbox.launched import CHUNK_BYTES, CPU_POLL_S, STDERR_KEPT_BYTES, Launched
from or1_megatron.verify.sandbox.program import Ending, describe_exit


class SessionEnded(Or1Error):
    """No answer: the program ended, took too long or wrote too much; ``ending`` says which, the message how."""

    def __init__(self, ending: Ending, words: str) -> None:
        super().__init__(words)
        self.ending = ending


class Session:
    """One program, waiting at its gate, and let go here. After SessionEnded there is nothing left but to close it."""

    def __init__(self, launched: Launched) -> None:
        self._launched, self._process = launched, launched.process
        self._pending, self._errors = bytearray(), bytearray()
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        launched.release()

    def ask(self, line: bytes, timeout_s: float) -> bytes:
        """Send one line (without its end) and wait for the next line out, without its end. Raises SessionEnded."""
        deadline_s = time.monotonic() + timeout_s - self._launched.starved_s()
        process, unsent = self._process, memoryview(line + b"\n")
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while (end := self._pending.find(b"\n")) < 0:
                if len(self._pending) > self._launched.limits.output_bytes:
                    raise SessionEnded("output", f"more than {self._launched.limits.output_bytes} bytes of output")
                remaining_s = deadline_s + self._launched.starved_s() - time.monotonic()
                if remaining_s <= 0:
                    raise SessionEnded("wall_time", f"no answer within {timeout_s:g} s")
                cpu_left_s = self._launched.limits.cpu_s - self._launched.cpu_s()
                if cpu_left_s <= 0:
                    raise SessionEnded("cpu_time", f"more than {self._launched.limits.cpu_s:g} s of CPU time")
                for key, _ in selector.select(min(remaining_s, max(cpu_left_s, CPU_POLL_S))):
                    if key.fileobj is process.stdin:
                        unsent = _write(key.fd, unsent)
                        open_still = bool(unsent)
                    else:
                        open_still = self._read(key.fd)
                    if not open_still:
                        selector.unregister(key.fileobj)
        answer = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return answer

    def close(self) -> None:
        self._launched.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, descriptor: int) -> bool:
        """Take what a pipe holds; whether it is still open. Raises SessionEnded at the end of standard output."""
        assert self._process.stdout is not None
        chunk = os.read(descriptor, CHUNK_BYTES)
        if descriptor != self._process.stdout.fileno():
            self._errors += chunk
            del self._errors[:-STDERR_KEPT_BYTES]
            return bool(chunk)
        self._pending += chunk
        if not chunk:
            raise self._how_it_ended()
        return True

    def _how_it_ended(self) -> SessionEnded:
        ending, status, cpu_s = self._launched.ended()
        if ending == "exited":
            last = (self._errors.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:200]
            return SessionEnded("exited", f"{describe_exit(status)}: {last}")
        return SessionEnded(ending, f"killed for its {ending.replace('_', ' ')}, after {cpu_s:.1f} s of CPU time")


def _write(descriptor: int, unsent: memoryview) -> memoryview:
    """What is still unsent; nothing when nobody reads any more."""
    try:
        return unsent[os.write(descriptor, unsent) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return memoryview(b"")
