"""One test of untrusted Python in one fresh bubblewrap sandbox: no network, no host files, no other processes.

Inside: empty namespaces, /usr and the interpreter read-only, a sized tmpfs at /tmp, an unprivileged uid, a session of
its own, hard limits on CPU time, memory, file size, processes and open files. Outside: the reader caps the output and
the wall time, and kills. Everything in the sandbox dies with its first process, and that with us.

Not here yet: a seccomp filter, cgroups (memory is limited per process, not per sandbox), and a second tier for
machines that refuse user namespaces: there, construction fails.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

Ending = Literal["exited", "wall_time", "output"]

_RUNNER = Path(__file__).with_name("sandbox_runner.py")
_UNPRIVILEGED_ID = 65534  # nobody
_PROBE_WALL_S = 30.0
_REAP_S = 5.0
_STDERR_KEPT_BYTES = 2000
_CHUNK_BYTES = 1 << 16


class SandboxUnavailable(RuntimeError):
    """This machine cannot run untrusted code safely; the message says what to install and what does not work."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Of one test. ``memory_bytes`` is each process's address space (the recipe allows 50 GB)."""

    wall_s: float = 5.0
    memory_bytes: int = 4 << 30
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    processes: int = 64
    open_files: int = 128
    output_bytes: int = 16 << 20

    def rlimits(self) -> dict[str, int]:
        cpu_s = int(self.wall_s) + 2  # behind the wall limit: it ends what outlives its killer
        return {
            "RLIMIT_CPU": cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How one run ended. ``output`` is what it wrote to standard output, capped.

    ``started`` is False when the sandbox itself could not be set up: then nothing is known about the submission.
    """

    started: bool
    ending: Ending
    exit_status: int
    output: bytes
    errors: str
    wall_s: float


class Sandbox:
    """Runs submissions. Construction proves, by running one, that sandboxes work here; else SandboxUnavailable."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        bubblewrap = shutil.which("bwrap")
        if bubblewrap is None:
            raise SandboxUnavailable(
                "bubblewrap is not installed (no 'bwrap' on PATH): problems of ability 'code' cannot be verified "
                "without it, math can. Install it: apt install bubblewrap (or dnf install bubblewrap)"
            )
        self._bubblewrap = bubblewrap
        self._runner = _RUNNER.read_bytes()
        failures = []
        for interpreter in _interpreters():
            self._interpreter = interpreter
            try:
                result = self._run("print(6 * 7)", {"kind": "stdin"}, b"", _PROBE_WALL_S)
            except OSError as error:  # bwrap itself cannot be executed, by 'nobody' for one
                failures.append(f"{interpreter}: {error}")
                continue
            if result.ending == "exited" and result.output == b"42\n":
                return
            failures.append(f"{interpreter}: {result.errors.strip() or result.ending}")
        raise SandboxUnavailable(
            "bubblewrap is installed but no sandbox starts here, so problems of ability 'code' cannot be verified "
            "(math can). It needs unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a "
            "container a seccomp profile that allows unshare) and a Python that user 'nobody' can read, such as "
            "/usr/bin/python3. Tried: " + "; ".join(failures)
        )

    def run(self, source: str, request: Mapping[str, Any], stdin: bytes) -> SandboxResult:
        """One fresh process for one test. ``request`` is what the runner reads; it must hold nothing secret."""
        return self._run(source, request, stdin, self.limits.wall_s)

    def _run(self, source: str, request: Mapping[str, Any], stdin: bytes, wall_s: float) -> SandboxResult:
        files = {
            "runner.py": self._runner,
            "submission.py": source.encode("utf-8", "surrogatepass"),
            "request.json": json.dumps(request).encode(),
        }
        descriptors = {name: _memory_file(name, content) for name, content in files.items()}
        stdin_descriptor = _memory_file("stdin", stdin)
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # root is exempt from RLIMIT_NPROC even inside a user namespace
            identity = {"user": _UNPRIVILEGED_ID, "group": _UNPRIVILEGED_ID, "extra_groups": []}
        status_read, status_write = os.pipe()
        started_s = time.monotonic()
        try:
            process = subprocess.Popen(
                self._command(descriptors, status_write),
                stdin=stdin_descriptor,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(*descriptors.values(), status_write),
                cwd="/",
                env={},
                **identity,
            )
        finally:
            for descriptor in (*descriptors.values(), stdin_descriptor, status_write):
                os.close(descriptor)
        with process, os.fdopen(status_read, "rb", buffering=0) as status:
            try:
                ending, output, errors = _read_capped(process, started_s + wall_s, self.limits.output_bytes)
            finally:
                started = _end(process, status)
        spent_s = time.monotonic() - started_s
        return SandboxResult(started, ending, process.returncode, output, errors.decode("utf-8", "replace"), spent_s)

    def _command(self, descriptors: Mapping[str, int], status_descriptor: int) -> list[str]:
        prefix = self._interpreter.parent.parent
        arguments = [self._bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
        # Without --as-pid-1 bubblewrap leaves a middle process behind for init to reap, and in many containers the
        # first process reaps nothing: one zombie per test.
        arguments += ["--as-pid-1", "--json-status-fd", str(status_descriptor)]
        arguments += ["--uid", str(_UNPRIVILEGED_ID), "--gid", str(_UNPRIVILEGED_ID), "--cap-drop", "ALL"]
        arguments += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
        for name in ("lib", "lib64", "bin"):
            if Path("/", name).is_symlink():
                arguments += ["--symlink", f"usr/{name}", f"/{name}"]
            elif Path("/", name).is_dir():
                arguments += ["--ro-bind", f"/{name}", f"/{name}"]
        if not prefix.is_relative_to("/usr"):
            arguments += ["--ro-bind", str(prefix), str(prefix)]
        arguments += ["--dev", "/dev", "--size", str(self.limits.scratch_bytes), "--tmpfs", "/tmp"]
        for name, descriptor in descriptors.items():
            arguments += ["--ro-bind-data", str(descriptor), f"/box/{name}"]
        for name, value in {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}.items():
            arguments += ["--setenv", name, value]
        arguments += ["--remount-ro", "/", "--chdir", "/tmp"]
        # -I: no user site, no PYTHON* variables, no script folder on the path; -B: writes no bytecode
        return [*arguments, str(self._interpreter), "-I", "-B", "/box/runner.py", json.dumps(self.limits.rlimits())]


def _end(process: subprocess.Popen[bytes], status: FileIO) -> bool:
    """End the sandbox; returns whether the test's program had been started in it.

    The sandbox's first process is killed, and with it all others in there, so that bubblewrap reaps it. The status
    pipe is bubblewrap's own: {"child-pid"} at once and {"exit-code"} at the end if set-up had succeeded; nothing
    inside the sandbox can write to it.
    """
    described = b""
    if process.poll() is None:
        select.select([status], [], [], _REAP_S)
        described = status.read(_CHUNK_BYTES) or b""
        if described:
            os.kill(json.loads(described.splitlines()[0])["child-pid"], signal.SIGKILL)
            try:
                process.wait(_REAP_S)
            except subprocess.TimeoutExpired:
                pass
        process.kill()  # --die-with-parent: should the child be unknown, it dies with bubblewrap
        process.wait()
    while chunk := status.read(_CHUNK_BYTES):
        described += chunk
    return any("exit-code" in json.loads(line) for line in described.splitlines())


def _interpreters() -> list[Path]:
    """Pythons to try, this one's base first: the submission should see the version that the user runs."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    candidates = [Path(os.path.realpath(base)), Path(os.path.realpath("/usr/bin/python3"))]
    return [path for path in dict.fromkeys(candidates) if path.is_file()]


def _memory_file(name: str, content: bytes) -> int:
    """A descriptor, at its start, of an anonymous file: no name that another process could open."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_capped(process: subprocess.Popen[bytes], deadline_s: float, output_bytes: int) -> tuple[Ending, bytes, bytes]:
    """Read both pipes until they close, the deadline passes or the output exceeds its cap."""
    assert process.stdout is not None and process.stderr is not None
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        while selector.get_map():
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return "wall_time", bytes(output), bytes(errors)
            for key, _ in selector.select(remaining_s):
                chunk = os.read(key.fd, _CHUNK_BYTES)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.data is errors:
                    errors += chunk
                    del errors[:-_STDERR_KEPT_BYTES]  # the end of a traceback says most; the flood is drained
                else:
                    output += chunk
                    if len(output) > output_bytes:
                        return "output", bytes(output[:output_bytes]), bytes(errors)
    try:  # both pipes can be closed by a process that goes on
        process.wait(max(deadline_s - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return "wall_time", bytes(output), bytes(errors)
    return "exited", bytes(output), bytes(errors)


def describe_exit(status: int) -> str:
    """An exit status in words: bubblewrap reports a death by signal n as 128 + n."""
    number = -status if status < 0 else status - 128
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exit status {status}"
