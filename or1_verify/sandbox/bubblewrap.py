"""The sandbox's first tier: bubblewrap, which gives each run namespaces of its own.

The program has no network and no /proc, and sees no other processes. It can read only /usr and the interpreter, and
write only to two small tmpfs, /tmp and /dev/shm. It has an unprivileged uid and its own session. All processes of a
sandbox die with its first process, and the first process dies with ours.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from or1_verify.sandbox.confined_process import (
    ENVIRONMENT,
    PYTHON_OPTIONS,
    RUNNER,
    UNPRIVILEGED_ID,
    ConfinedProcess,
    memory_file,
)
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxUnavailable
from or1_verify.sandbox.seccomp import namespaced_filter

_BOX = "/box"


class Bubblewrap:
    """Launches programs under bubblewrap.

    Raises SandboxUnavailable at construction if bubblewrap is not installed, or the processor has no seccomp filter.
    """

    name = "bubblewrap"
    needs = (
        "bubblewrap needs unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container a "
        "seccomp profile that allows unshare) and a Python that user 'nobody' can read, such as /usr/bin/python3"
    )

    def __init__(self, interpreter: Path) -> None:
        executable = shutil.which("bwrap")
        if executable is None:
            raise SandboxUnavailable(
                "bubblewrap is not installed (no 'bwrap' on PATH): problems of ability 'code' cannot be verified "
                "without it, math can. Install it: apt install bubblewrap (or dnf install bubblewrap)"
            )
        self._executable = executable
        self.interpreter = interpreter
        self._filter = namespaced_filter()

    def launch(self, program: Program, stdin: bytes | None, limits: SandboxLimits, in_cgroup: bool) -> ConfinedProcess:
        """Start a sandbox. Its runner waits for ``ConfinedProcess.release`` before it becomes the program.

        ``stdin``: content, or None for a pipe that stays open. Raises OSError if no process can be started.
        """
        opened = []
        status_read, status_write = os.pipe()
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # root is exempt from RLIMIT_NPROC even inside a user namespace
            identity = {"user": UNPRIVILEGED_ID, "group": UNPRIVILEGED_ID, "extra_groups": []}
        try:
            opened.append(memory_file("seccomp", self._filter))
            binds = ["--seccomp", str(opened[-1])]
            for name, content in {"runner.py": RUNNER, **program.files}.items():
                opened.append(memory_file(name, content))
                mode = "0555" if name in program.executable else "0444"
                binds += ["--perms", mode, "--ro-bind-data", str(opened[-1]), f"{_BOX}/{name}"]
            binds += ["--remount-ro", "/", "--chdir", "/tmp"]
            runner = [str(self.interpreter), *PYTHON_OPTIONS, f"{_BOX}/runner.py"]
            command = [*self._confinement(limits, status_write), *binds, *runner]
            given = (*opened, status_write)
            launched = ConfinedProcess.start(command, stdin, limits, given, cwd="/", env={}, **identity)
        except OSError:
            os.close(status_read)
            raise
        finally:
            for descriptor in (*opened, status_write):
                os.close(descriptor)
        launched.status = os.fdopen(status_read, "rb")
        launched.instruct(limits.rlimits(in_cgroup), program.command, _BOX, self.interpreter)
        return launched

    def _confinement(self, limits: SandboxLimits, status_descriptor: int) -> list[str]:
        prefix = self.interpreter.parent.parent
        arguments = [self._executable, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
        # Without --as-pid-1 bubblewrap leaves a middle process behind for init to reap, and in many containers the
        # first process reaps nothing: one zombie per test.
        arguments += ["--as-pid-1", "--json-status-fd", str(status_descriptor)]
        arguments += ["--uid", str(UNPRIVILEGED_ID), "--gid", str(UNPRIVILEGED_ID), "--cap-drop", "ALL"]
        arguments += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
        for name in ("lib", "lib64", "bin"):
            if Path("/", name).is_symlink():
                arguments += ["--symlink", f"usr/{name}", f"/{name}"]
            elif Path("/", name).is_dir():
                arguments += ["--ro-bind", f"/{name}", f"/{name}"]
        size = ["--size", str(limits.scratch_bytes), "--tmpfs"]
        arguments += ["--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev", *size, "/tmp"]
        if not prefix.is_relative_to("/usr"):  # behind /tmp, which may hold it
            arguments += ["--ro-bind", str(prefix), str(prefix)]
        for name, value in {**ENVIRONMENT, "LD_LIBRARY_PATH": str(self.interpreter.parent)}.items():
            arguments += ["--setenv", name, value]
        return arguments
