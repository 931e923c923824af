"""Talks to a program that stays in its sandbox and answers line by line.

Each answer must come within the wall time limit. CPU time and memory are limited as in any run.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from or1_verify.errors import Or1Error
from or1_verify.sandbox.launched import Launched


class SessionEnded(Or1Error):
    """The program gave no answer: it ended or met a limit. The message says which."""


class Session(AbstractContextManager["Session"]):
    """One program, which is released here. After SessionEnded it can only be closed."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        assert launched.process.stdin is not None
        os.set_blocking(launched.process.stdin.fileno(), False)
        launched.release()

    def ask(self, line: bytes) -> bytes:
        """Send one line and return the next line that the program writes, both without their ends.

        Raises SessionEnded, and SandboxFailure as a run does.
        """
        stopped = self._launched.read(line)
        if stopped is not None:
            raise SessionEnded(self._launched.finish(stopped).failure or "it ended with exit status 0")
        answer, _, rest = self._launched.output.partition(b"\n")
        self._launched.output = rest
        return bytes(answer)

    def describe_death(self, status: int, cpu_s: float) -> str:
        """Say why a child of the program died, by its exit status (128 + n for signal n) and its CPU time."""
        met = self._launched.limit_met(cpu_s)
        return self._launched.limits.failure("exited" if met == "processes" else met, status, "", met == "processes")

    def close(self) -> None:
        self._launched.close()

    def __exit__(self, *_: object) -> None:
        self.close()
