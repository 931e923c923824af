"""Untrusted programs, each run in a fresh sandbox. How to ask for one: ``verify.program``.

Tiers: bubblewrap (``sandbox_bubblewrap``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from or1_megatron.verify.program import (
    Program,
    SandboxFailure,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailable,
    describe_exit,
)
from or1_megatron.verify.sandbox_bubblewrap import Bubblewrap
from or1_megatron.verify.sandbox_session import Session, SessionEnded

__all__ = [
    "Program",
    "Sandbox",
    "SandboxFailure",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailable",
    "Session",
    "SessionEnded",
    "describe_exit",
]

_PROBE = Program({"main.py": b"print(int(input()) * 7)"}, ("{python}", "{box}/main.py"))
_PROBE_WALL_S = 30.0


class Sandbox:
    """Runs programs. Construction proves, by running one, that sandboxes work here; else SandboxUnavailable."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        failures = []
        for interpreter in _interpreters():
            self._tier = Bubblewrap(interpreter)
            try:
                result = self.run(_PROBE, b"6", SandboxLimits(wall_s=_PROBE_WALL_S))
            except OSError as error:  # bwrap itself cannot be executed, by 'nobody' for one
                failures.append(f"{interpreter}: {error}")
                continue
            if result.succeeded and result.output == b"42\n":
                return
            failures.append(f"{interpreter}: {result.errors.strip() or result.ending}")
        raise SandboxUnavailable(
            "bubblewrap is installed but no sandbox starts here, so problems of ability 'code' cannot be verified "
            f"(math can). {self._tier.needs}. Tried: " + "; ".join(failures)
        )

    def run(self, program: Program, stdin: bytes = b"", limits: SandboxLimits | None = None) -> SandboxResult:
        """Run the program once, with ``limits`` or the sandbox's own. Raises SandboxFailure; thread-safe."""
        launched = self._tier.launch(program, stdin, limits or self.limits)
        try:
            launched.wait_at_gate()
            return launched.run()
        finally:
            launched.close()

    def open(self, program: Program, limits: SandboxLimits | None = None) -> Session:
        """Start a program that is talked to; its ``wall_s`` is for the asker to keep. Raises SandboxFailure."""
        launched = self._tier.launch(program, None, limits or self.limits)
        try:
            launched.wait_at_gate()
            return Session(launched)
        except BaseException:
            launched.close()
            raise

    def close(self) -> None:
        """Give back what outlives a run."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _interpreters() -> list[Path]:
    """Pythons to try, this one's base first: the submission should see the version that the user runs."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    candidates = [Path(os.path.realpath(base)), Path(os.path.realpath("/usr/bin/python3"))]
    return [path for path in dict.fromkeys(candidates) if path.is_file()]
