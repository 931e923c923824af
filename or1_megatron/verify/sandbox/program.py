"""What the sandbox is asked, what it answers, and how it fails: the words between the verifiers and the sandbox.

    with Sandbox(SandboxLimits(cpu_s=5.0)) as sandbox:
        program = Program({"main.py": source, "case.json": case}, ("{python}", "{box}/main.py", "{box}/case.json"))
        result = sandbox.run(program, stdin=b"21\\n")  # or with limits=..., for this run only
        accepted = result.succeeded and result.output == b"42\\n"

Whatever the program does is a SandboxResult. When the sandbox itself fails, ``run`` raises SandboxFailure (an OSError),
for then nothing is known of the program. ``run`` may be called from several threads. Every run gets fresh processes,
files and scratch space, and nothing of it is left when ``run`` returns.

``with sandbox.open(program) as session: session.ask(b"line", timeout_s=1.0)`` keeps one program running and talks to
it, line by line; see ``verify.sandbox.session``.

A compiled program is a file that is ``executable``: ``Program({"check": elf, ...}, ("{box}/check", "{box}/input"),
executable={"check"})``. A compiler is a program of ours with ``tool=True``, and its product comes back as its output:
``Program({"a.cpp": source}, ("/bin/sh", "-c", "g++ -o a.out {box}/a.cpp && cat a.out"), tool=True)``.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.errors import UserError

Ending = Literal["exited", "cpu_time", "wall_time", "memory", "output"]
"""exited: by itself, or by a signal; the others: killed for exceeding that limit."""

SandboxTier = Literal["auto", "bubblewrap", "landlock", "weak"]

WALL_PER_CPU = 2.0
"""A run's wall time limit over its CPU time limit."""

_CONFIG = VerifyConfig()


class SandboxUnavailable(UserError, RuntimeError):
    """This machine cannot run untrusted code safely; the message says what to install and what does not work."""


class SandboxFailure(UserError, OSError):
    """The sandbox of one run failed: it did not start, or the machine, not the program, ran out of something."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command and the files that it may read; nothing in here may be secret from it.

    ``files``: name (no folders) to content, read-only in a folder of their own. In ``command``, ``{box}`` stands for
    that folder and ``{python}`` for the sandbox's interpreter. The working directory is the scratch space.
    ``tool``: a program of ours, such as a compiler, that may start processes and write scratch files in either tier;
    where there are no namespaces, submissions may do neither: there ``os.fork`` raises PermissionError.
    """

    files: Mapping[str, bytes]
    command: tuple[str, ...]
    executable: AbstractSet[str] = field(default_factory=frozenset)
    tool: bool = False


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one run. What the section ``verify`` of the configuration sets has its default there.

    ``cpu_s`` is the time limit; ``wall_s`` bounds programs that sleep, and leaves room on a busy machine.
    ``memory_bytes`` bounds each process's address space (the recipe allows 50 GB) and, with cgroups, the whole sandbox.
    """

    cpu_s: float = _CONFIG.timeout_s
    wall_s: float = WALL_PER_CPU * _CONFIG.timeout_s
    memory_bytes: int = _CONFIG.memory_bytes
    processes: int = _CONFIG.processes
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    open_files: int = 128
    output_bytes: int = 16 << 20

    def rlimits(self) -> dict[str, int]:
        """By the names of the ``resource`` module."""
        return {
            "RLIMIT_CPU": math.ceil(self.cpu_s) + 1,  # behind the reader's, which is exact: for what it does not see
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How one run ended. ``output`` is what it wrote to standard output, capped; ``errors`` the end of the other.

    ``exit_status``: 128 + n for a death by signal n. ``cpu_s`` is of all its processes that were waited for.
    """

    ending: Ending
    exit_status: int
    output: bytes
    errors: str
    wall_s: float
    cpu_s: float

    @property
    def succeeded(self) -> bool:
        return self.ending == "exited" and self.exit_status == 0


def describe_exit(status: int) -> str:
    """An exit status in words."""
    number = -status if status < 0 else status - 128
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exit status {status}"
