"""The sandbox's second tier, for machines that refuse user namespaces: one process, confined by Landlock and seccomp.

The program can read only /usr, the interpreter, a few devices and its own folder, and write no file. It cannot start
processes, use sockets, or signal other processes. If root starts the process, the process gets a uid of its own.
Killing the process ends the sandbox, and no files are left behind. Landlock does not cover stat, so the program can see
names and sizes of host files.

The runner confines itself, from inside, before it comes to the gate (``runner.lock``). Source: landlock(7),
linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from or1_verify.sandbox.confined_process import ENVIRONMENT, PYTHON_OPTIONS, RUNNER, UNPRIVILEGED_ID, ConfinedProcess
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxUnavailable
from or1_verify.sandbox.seccomp import lone_filter, namespaced_filter

_FIRST_OWN_ID = 0x40000000
_FOLDER_PREFIX = "or1-sandbox-"
_TASKS_KNOWN_S = 10.0
_CREATE_RULESET, _VERSION_FLAG = 444, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# All file rights that each version of Landlock knows. A right that no rule gives is refused.
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = {"/dev/null": _READ_FILE | _WRITE_FILE, "/dev/zero": _READ_FILE, "/dev/urandom": _READ_FILE}
_log = logging.getLogger(__name__)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if the kernel has none."""
    version = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    return max(version, 0)


class Landlock:
    """Launches programs under Landlock and seccomp, or, with ``confine_files=False``, under seccomp alone (weaker).

    Raises SandboxUnavailable at construction if Landlock is needed and missing, if the processor has no seccomp filter,
    or if root cannot become another user.
    """

    name = "landlock"
    needs = "Landlock needs Linux 5.13 or newer with it enabled, and a container that allows its system calls"

    def __init__(self, interpreter: Path, confine_files: bool = True) -> None:
        self._version = min(landlock_version(), max(_FILE_RIGHTS) + 1) if confine_files else 0
        if confine_files and not self._version:
            raise SandboxUnavailable(f"this kernel has no Landlock. {self.needs}")
        if not confine_files:
            self.name = "weak"
        lone_filter(1)
        self.interpreter = interpreter
        self._identity = _own_identity()
        self._tasks = (0, -_TASKS_KNOWN_S)
        _remove_folders_of_dead_verifiers()

    def launch(self, program: Program, stdin: bytes | None, limits: SandboxLimits, in_cgroup: bool) -> ConfinedProcess:
        """Start a sandbox, whose runner then waits until it is released. Raises OSError if no process can start."""
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-"))
        try:
            box, scratch = self._fill(folder, program)
            environment = {**ENVIRONMENT, "HOME": str(scratch), "TMPDIR": str(scratch)}
            environment["LD_LIBRARY_PATH"] = str(self.interpreter.parent)  # a copy of ours has its libraries there
            runner = [str(self.interpreter), *PYTHON_OPTIONS, str(box / "runner.py")]
            launched = ConfinedProcess.start(
                runner, stdin, limits, cwd=scratch, env=environment, start_new_session=True, **self._identity
            )
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        launched.folder, launched.whole_group = folder, program.tool
        lock = self._lock(launched.process.pid, box, scratch, program.tool)
        launched.instruct(self._rlimits(limits, in_cgroup), program.command, str(box), self.interpreter, lock)
        return launched

    def _fill(self, folder: Path, program: Program) -> tuple[Path, Path]:
        """Make the folder that the program may read, and the scratch folder where a tool may write; return both."""
        box, scratch = folder / "box", folder / "scratch"
        folder.chmod(0o755)
        box.mkdir(mode=0o755)
        scratch.mkdir()
        scratch.chmod(0o777 if program.tool else 0o555)
        for name, content in {"runner.py": RUNNER, **program.files}.items():
            (box / name).write_bytes(content)
            (box / name).chmod(0o555 if name in program.executable else 0o444)
        return box, scratch

    def _lock(self, pid: int, box: Path, scratch: Path, tool: bool) -> dict[str, Any]:
        """Return the instructions by which the runner confines itself (see ``runner.lock``)."""
        lock: dict[str, Any] = {"parent": os.getpid(), "filter": namespaced_filter() if tool else lone_filter(pid)}
        if not self._version:
            return lock
        rules = [(path, _READ) for path in (*_READABLE, str(self.interpreter.parent.parent), str(box))]
        rules += [*_DEVICES.items(), (str(scratch), _FILE_RIGHTS[min(self._version, 5)] if tool else _READ)]
        lock["attributes"] = (
            _FILE_RIGHTS[min(self._version, 5)],
            *((3,) if self._version >= 4 else ()),  # TCP: bind, connect
            *((3,) if self._version >= 6 and not tool else ()),  # scopes: abstract sockets, signals
        )
        lock["rules"] = [
            (path, rights if os.path.isdir(path) else rights & ~_READ_DIR)
            for path, rights in rules
            if os.path.exists(path)
        ]
        return lock

    def _rlimits(self, limits: SandboxLimits, in_cgroup: bool) -> dict[str, int]:
        rlimits = limits.rlimits(in_cgroup)
        if not self._identity:  # the kernel counts all tasks of our own user, so those are added
            if time.monotonic() - self._tasks[1] >= _TASKS_KNOWN_S:
                self._tasks = (_threads_of_user(os.geteuid()), time.monotonic())
            rlimits["RLIMIT_NPROC"] += self._tasks[0]
        return rlimits


def _own_identity() -> dict[str, Any]:
    """Return Popen's options for a uid that no other process has, so that the limit on processes counts no others.

    Only root can set a uid, so other users get no options. If the system refuses that uid, the options name ``nobody``.
    """
    if os.geteuid() != 0:
        return {}
    for number in (_FIRST_OWN_ID + os.getpid(), UNPRIVILEGED_ID):
        identity: dict[str, Any] = {"user": number, "group": number, "extra_groups": []}
        try:
            subprocess.run(["/bin/true"], check=True, **identity)
        except (OSError, subprocess.CalledProcessError):  # a container that has no such uid
            continue
        return identity
    raise SandboxUnavailable("this process is root and cannot become an unprivileged user: setuid is refused")


def _threads_of_user(user: int) -> int:
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdecimal() and entry.stat().st_uid == user:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:  # it has ended
            continue
    return count


def _remove_folders_of_dead_verifiers() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*-*"):
        owner = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(folder, ignore_errors=True)
