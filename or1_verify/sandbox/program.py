"""The sandbox's interface: programs, their results, and the exceptions of a run. ``limits`` has the limits of a run.

    with Sandbox(SandboxLimits(cpu_s=5.0)) as sandbox:
        program = Program({"main.py": source, "case.json": case}, ("{python}", "{box}/main.py", "{box}/case.json"))
        result = sandbox.run(program, stdin=b"21\\n")  # or with limits=..., for this run only
        accepted = result.succeeded and result.output == b"42\\n"

Whatever a program does, ``run`` returns a SandboxResult. If the sandbox itself fails, ``run`` raises SandboxFailure (an
OSError), because nothing is then known about the program. Several threads may call ``run``. Every run gets new
processes, files and scratch space, all of which are gone when ``run`` returns.

``with sandbox.open(program) as session: session.ask(b"line")`` keeps one program running and talks to it line by line.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from or1_verify.errors import Or1Error, UserError
from or1_verify.sandbox.limits import Ending

SandboxTier = Literal["auto", "bubblewrap", "landlock", "weak"]


class SandboxUnavailable(UserError, RuntimeError):
    """This machine cannot run untrusted code safely; the message says what does not work and what to install."""


class SandboxFailure(UserError, OSError):
    """A sandbox failed, not the program in it: the sandbox did not start, or a resource of the machine ran out."""


class SessionEnded(Or1Error):
    """A program that answers line by line gave no answer. It ended, or it met the limit that the message names."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command and the files that it may read. The program can see all of them, so they must hold no secrets.

    ``files``: content by name (without folders), read-only in a folder of their own. In ``command``, ``{box}`` stands
    for this folder and ``{python}`` for the sandbox's interpreter. The working directory is the scratch space.
    ``tool``: a trusted program, such as a compiler, which may start processes and write scratch files in every tier.
    Submissions may do neither in a tier without namespaces: ``os.fork`` then raises PermissionError.
    """

    files: Mapping[str, bytes]
    command: tuple[str, ...]
    executable: AbstractSet[str] = field(default_factory=frozenset)
    tool: bool = False


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of one run. ``output``: standard output, up to its limit. ``errors``: the end of standard error.

    ``exit_status``: 128 + n for a death by signal n. ``cpu_s``: CPU time of all processes that were waited for.
    ``failure``: why the run failed, in words; "" if it succeeded.
    """

    ending: Ending
    exit_status: int
    output: bytes
    errors: str
    cpu_s: float
    failure: str

    @property
    def succeeded(self) -> bool:
        return not self.failure
