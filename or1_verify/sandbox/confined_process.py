"""Controls one sandbox from outside, in any tier: starts it, waits for its confinement, watches its limits, ends it."""

from __future__ import annotations

import json
import marshal
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from or1_verify.sandbox.cgroups import Cgroup, CgroupPool
from or1_verify.sandbox.limits import Ending, SandboxLimits
from or1_verify.sandbox.program import SandboxFailure, SandboxResult, SessionEnded

RUNNER = Path(__file__).with_name("runner.py").read_bytes()
PYTHON_OPTIONS = ("-I", "-S", "-B")
"""-I: no user site, no PYTHON* variables, no script folder on the path. -S: no .pth files, which may import anything
at every start (the runner adds the folders of packages itself). -B: no bytecode is written."""
UNPRIVILEGED_ID = 65534  # nobody
ENVIRONMENT = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_SET_UP_S = 60.0
_STARVED_WALLS = 10
_CPU_POLL_S = 0.01
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid's encoding: a process's clock is ~pid in the upper bits
_REAP_S = 5.0
_CLOSED_S = 0.5
_STDERR_KEPT_BYTES = 2000
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class ConfinedProcess(AbstractContextManager["ConfinedProcess"]):
    """A started sandbox. Its first program, the runner, confines itself, and then waits at the gate, a socket.

    When the runner is released, it becomes the program. ``process`` is our child: the program itself, or bubblewrap,
    whose child is the program. ``status`` is the pipe on which bubblewrap tells {"child-pid"}; no process inside the
    sandbox can write to this pipe.
    """

    process: subprocess.Popen[bytes]
    gate: socket.socket
    limits: SandboxLimits
    status: BufferedReader | None = None
    folder: Path | None = None
    """The sandbox's folder, which is removed at the end."""
    whole_group: bool = False
    """Whether to kill the program's whole process group, because it may have children that do not end with it."""
    pid: int = 0
    """Process id of the sandbox's first process, or 0 while unknown. All other processes end with the first."""
    output: bytearray = field(default_factory=bytearray)
    """Bytes of standard output that have been read and not yet returned."""
    errors: bytearray = field(default_factory=bytearray)
    """The last bytes that the program wrote to standard error."""
    _cgroups: CgroupPool | None = None
    _cgroup: Cgroup | None = None
    _spent_s: float = 0.0

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        stdin: bytes | None,
        limits: SandboxLimits,
        descriptors: Sequence[int] = (),
        **options: Any,
    ) -> ConfinedProcess:
        """Start ``command``, which runs the runner. Its last argument, the descriptor of the gate, is added here.

        ``stdin``: content, or None for a pipe that stays open. ``options``: for Popen. Raises OSError if Popen does.
        """
        gate, inner_gate = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        standard_input = subprocess.PIPE if stdin is None else memory_file("stdin", stdin)
        try:
            process = subprocess.Popen(
                [*command, str(inner_gate.fileno())],
                stdin=standard_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(*descriptors, inner_gate.fileno()),
                bufsize=0,
                **options,
            )
        except OSError:
            gate.close()
            raise
        finally:
            inner_gate.close()
            if stdin is not None:
                os.close(standard_input)
        return cls(process, gate, limits)

    def instruct(
        self, rlimits: Mapping[str, int], command: Sequence[str], box: str, python: Path, lock: Any = None
    ) -> None:
        """Send the runner its instructions (see the module ``runner``), as marshal, which any Python can read."""
        command = [part.replace("{box}", box).replace("{python}", str(python)) for part in command]
        with suppress(BrokenPipeError):  # it has ended already; waiting at the gate reports that
            self.gate.send(marshal.dumps({"rlimits": dict(rlimits), "command": command, "lock": lock}, 2))

    def wait_at_gate(self, cgroups: CgroupPool | None) -> None:
        """Put the runner into a cgroup of ``cgroups``, and wait until it is confined.

        Raises SandboxFailure if the runner is late, or if it ends first; the message then has what the runner wrote.
        """
        self.gate.settimeout(_SET_UP_S)
        try:
            self._identify()
            if cgroups is not None and self.pid:  # the kernel takes its time, while the runner starts
                self._enter_cgroup(cgroups)
            arrived = self.gate.recv(1)
        except TimeoutError:
            raise SandboxFailure(f"the sandbox was not set up within {_SET_UP_S:.0f} s") from None
        except (ConnectionResetError, ProcessLookupError):  # it ended with its instructions unread, or before
            arrived = b""
        if not arrived:
            assert self.process.stderr is not None
            readable, _, _ = select.select([self.process.stderr], [], [], _REAP_S)
            errors = os.read(self.process.stderr.fileno(), _CHUNK_BYTES) if readable else b""
            raise SandboxFailure(errors.decode("utf-8", "replace").strip()[-_STDERR_KEPT_BYTES:] or "it ended at once")

    def _identify(self) -> None:
        """Set ``pid``. It stays 0 if bubblewrap ends before it has made the sandbox. Raises TimeoutError."""
        if self.status is None:
            self.pid = self.process.pid
            return
        if not select.select([self.status], [], [], _SET_UP_S)[0]:
            raise TimeoutError
        if line := self.status.readline():
            self.pid = json.loads(line)["child-pid"]

    def _enter_cgroup(self, cgroups: CgroupPool) -> None:
        self._cgroups, self._cgroup = cgroups, cgroups.take()
        self._cgroup.limit(self.limits.memory_bytes, self.limits.processes)
        self._cgroup.add(self.pid)

    def release(self) -> None:
        """Let the waiting runner become the program."""
        self.gate.send(b"g")

    def ask(self, line: bytes) -> bytes:
        """Send one line to a released program, and return the next line that it writes, both without line ends.

        The answer must come within the wall time limit. CPU time and memory are limited as in any run. Raises
        SessionEnded if no answer comes; then the sandbox can only be closed. Raises SandboxFailure as ``finish`` does.
        """
        stopped = self.read(line)
        if stopped is not None:
            raise SessionEnded(self.finish(stopped).failure or "it ended with exit status 0")
        answer, _, self.output = self.output.partition(b"\n")
        return bytes(answer)

    def describe_death(self, status: int, cpu_s: float) -> str:
        """Return in words why a child of the program died. ``status``: its exit status, 128 + n for signal n."""
        met = self.limit_met(cpu_s)
        return self.limits.failure("exited" if met == "processes" else met, status, "", met == "processes")

    def read(self, line: bytes | None = None) -> Ending | None:
        """Read the program's output until the program ends, or, with a ``line`` to send, until it writes a line.

        Returns the limit that the program met, "exited" if it ended by itself, or None if it wrote a line. Time in
        which this process did not run (on a busy or paused machine) is not counted; what was written then is read.
        """
        process, limits, unsent = self.process, self.limits, memoryview(b"" if line is None else line + b"\n")
        left_s, late, starved_s = limits.wall_s, False, self.starved_s()
        latest_s = time.monotonic() + (1 + _STARVED_WALLS) * limits.wall_s
        with selectors.DefaultSelector() as selector:
            if line is not None:
                selector.register(process.stdin, selectors.EVENT_WRITE)  # type: ignore[arg-type]
            selector.register(process.stdout, selectors.EVENT_READ, self.output)  # type: ignore[arg-type]
            selector.register(process.stderr, selectors.EVENT_READ, self.errors)  # type: ignore[arg-type]
            open_pipes = selector.get_map()
            while open_pipes if line is None else process.stdout in open_pipes:
                if line is not None and b"\n" in self.output:
                    return None
                if left_s <= 0:
                    waited_s = self.starved_s() - starved_s
                    left_s, starved_s = left_s + waited_s, starved_s + waited_s
                if late and not _exited(process.pid, 0):
                    return "wall_time"
                looked_s = time.monotonic()
                late = left_s <= 0 or looked_s > latest_s
                cpu_left_s = limits.cpu_s - self.cpu_s()
                if cpu_left_s <= 0:
                    return "cpu_time"
                wait_s = 0.0 if late else min(left_s, max(cpu_left_s, _CPU_POLL_S))
                ready = selector.select(wait_s)
                left_s -= min(time.monotonic() - looked_s, wait_s)
                if late and not ready:
                    return "wall_time"
                for key, _ in ready:
                    if key.data is None:
                        unsent = _write(key.fd, unsent)
                        ended = not unsent
                    else:
                        ended = not self._take(key.fd, key.data)
                    if ended:
                        selector.unregister(key.fileobj)
                if len(self.output) > limits.output_bytes:
                    return "output"
        # a process that goes on can close both pipes
        return "exited" if _exited(process.pid, max(left_s, _CLOSED_S)) else "wall_time"

    def finish(self, stopped: Ending) -> SandboxResult:
        """End every process, and return the result. Its ending is ``stopped``, as ``read`` returned it.

        If ``stopped`` is "exited" but the program met a limit that the kernel enforces, the ending is this limit.
        Raises SandboxFailure if the kernel killed the program for memory although the program was within its own limit.
        """
        cpu_s = self.end()
        met = self.limit_met(cpu_s)
        ending = met if stopped == "exited" and met != "processes" else stopped
        status = self.process.returncode
        status = 128 - status if status < 0 else status
        output = bytes(self.output[: self.limits.output_bytes])
        errors = self.errors.decode("utf-8", "replace")
        failure = self.limits.failure(ending, status, errors, refused=met == "processes")
        return SandboxResult(ending, status, output, errors, cpu_s, failure)

    def limit_met(self, cpu_s: float) -> Ending | Literal["processes"]:
        """Return the limit that the program has met since the last call, by the kernel's counts; "exited" if none.

        ``cpu_s``: the CPU time that the program has used. "processes" means that the kernel refused the program a
        process or a thread, but did not kill it. Raises SandboxFailure as ``finish`` does.
        """
        events = self._cgroup.events() if self._cgroup is not None else Counter[str]()
        if events["kills"] and not events["memory"]:
            raise SandboxFailure("killed because this node ran out of memory; the program was within its own limit")
        if events["kills"]:
            return "memory"
        if cpu_s >= self.limits.cpu_s:
            return "cpu_time"
        return "processes" if events["refusals"] else "exited"

    def end(self) -> float:
        """Kill and reap the sandbox's processes, and return their CPU seconds. May be called again."""
        if self.process.returncode is not None:
            return self._spent_s
        if self.pid and self.pid != self.process.pid and not _exited(self.process.pid, 0):
            # The program is killed first, not bubblewrap, so that bubblewrap reaps it: in many containers the first
            # process reaps nothing. The program may have ended just now, with bubblewrap about to end itself.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _exited(self.process.pid, _REAP_S)
        # not reaped yet, so the number is still its own
        (os.killpg if self.whole_group else os.kill)(self.process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self._spent_s = usage.ru_utime + usage.ru_stime
        return self._spent_s

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.end()
        for pipe in (self.gate, self.status, self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if self._cgroups is not None and self._cgroup is not None:
            self._cgroups.release(self._cgroup)
            self._cgroups = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the sandbox's first process and its threads."""
        try:
            return time.clock_gettime((~self.pid << 3) | _CPUCLOCK_SCHED)
        except OSError:  # it has ended
            return 0.0

    def starved_s(self) -> float:
        """Return the seconds that the main thread has waited for a core, which do not count as the program's time.

        The result is bounded, so that a program that makes itself wait, by threads, gains little.
        """
        try:
            waited_s = int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):  # it has ended, or the kernel does not count
            return 0.0
        return min(waited_s, _STARVED_WALLS * self.limits.wall_s)

    def _take(self, descriptor: int, kept: bytearray) -> bool:
        """Append what a pipe holds to ``kept``, and return whether the pipe is still open."""
        chunk = os.read(descriptor, _CHUNK_BYTES)
        kept += chunk
        if kept is self.errors:
            del kept[:-_STDERR_KEPT_BYTES]  # the end of a traceback says most; the flood is drained
        return bool(chunk)


def memory_file(name: str, content: bytes) -> int:
    """Return the descriptor of an anonymous file with this content, which no other process can open by name."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _write(descriptor: int, unsent: memoryview) -> memoryview:
    """Write as many bytes as a pipe takes, and return the rest, which is empty if nobody reads the pipe any more."""
    try:
        return unsent[os.write(descriptor, unsent) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return memoryview(b"")


def _exited(pid: int, timeout_s: float) -> bool:
    """Return whether a child process ends within ``timeout_s``. Does not reap it."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
