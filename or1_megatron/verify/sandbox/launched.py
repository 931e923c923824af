"""The outside of one run, the same for every tier: wait until it is confined, let it go, read, limit, end it."""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from or1_megatron.verify.sandbox.cgroups import Cgroup, CgroupPool
from or1_megatron.verify.sandbox.program import Ending, SandboxFailure, SandboxLimits, SandboxResult

_SET_UP_S = 60.0
_STARVED_WALLS = 10
CPU_POLL_S = 0.01
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid's encoding: a process's clock is ~pid in the upper bits
_REAP_S = 5.0
STDERR_KEPT_BYTES = 2000
CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class Launched:
    """A sandbox whose runner is on its way to the gate, where it waits until it is let go.

    ``process`` is our child: the program itself, or bubblewrap, whose child the program then is; in the latter case
    ``status`` is the pipe to which bubblewrap writes {"child-pid"}; nothing inside the sandbox can write to it.
    """

    process: subprocess.Popen[bytes]
    gate: socket.socket
    status: FileIO | None
    limits: SandboxLimits
    folder: Path | None = None
    """Removed at the end."""
    whole_group: bool = False
    """The program may have children that do not end with it: its process group is killed."""
    pid: int = 0
    """Of the sandbox's first process; all others end with it. Known once it waits at the gate."""
    _cgroups: CgroupPool | None = None
    _cgroup: Cgroup | None = None
    _spent_s: float = 0.0

    def instruct(self, instructions: bytes) -> None:
        """Tell the runner what to do; see ``specification``."""
        try:
            self.gate.send(instructions)
        except BrokenPipeError:  # it has ended already, which waiting at the gate tells
            pass

    def wait_at_gate(self) -> None:
        """Until the program is confined. Raises SandboxFailure with what was written instead."""
        self.gate.settimeout(_SET_UP_S)
        try:
            arrived = self.gate.recv(1)
        except TimeoutError:
            raise SandboxFailure(f"the sandbox was not set up within {_SET_UP_S:.0f} s") from None
        except ConnectionResetError:  # it ended with its instructions unread
            arrived = b""
        if not arrived:
            assert self.process.stderr is not None
            readable, _, _ = select.select([self.process.stderr], [], [], _REAP_S)
            errors = os.read(self.process.stderr.fileno(), CHUNK_BYTES) if readable else b""
            raise SandboxFailure(errors.decode("utf-8", "replace").strip()[-STDERR_KEPT_BYTES:] or "it ended at once")
        self.pid = self.process.pid
        if self.status is not None:
            self.pid = json.loads(self.status.read(CHUNK_BYTES).splitlines()[0])["child-pid"]

    def enter(self, cgroups: CgroupPool) -> None:
        """Into a cgroup, with all that it will start; before it is let go."""
        self._cgroups, self._cgroup = cgroups, cgroups.take()
        self._cgroup.limit(self.limits.memory_bytes, self.limits.processes)
        self._cgroup.add(self.pid)

    def run(self) -> SandboxResult:
        """Let the program go; its result, with every process ended."""
        started_s = time.monotonic()
        self.release()
        stopped, output, errors = self._read(started_s + self.limits.wall_s)
        ending, status, cpu_s = self.ended()
        wall_s = time.monotonic() - started_s
        ending = ending if stopped == "exited" else stopped
        return SandboxResult(ending, status, output, errors.decode("utf-8", "replace"), wall_s, cpu_s)

    def release(self) -> None:
        """Let the program go: the runner becomes it."""
        self.gate.send(b"g")

    def ended(self) -> tuple[Ending, int, float]:
        """End what still runs: how it ended as far as the kernel's limits say, exit status, CPU seconds.

        Raises SandboxFailure when the kernel killed it for a want of memory that was not its own.
        """
        cpu_s = self.end()
        status = self.process.returncode
        status = 128 - status if status < 0 else status
        if self._cgroup is not None:
            killed, own_limit = self._cgroup.out_of_memory()
            if killed and not own_limit:
                raise SandboxFailure("killed for want of memory on this node, within its own limit")
            if killed:
                return "memory", status, cpu_s
        return "cpu_time" if cpu_s >= self.limits.cpu_s else "exited", status, cpu_s

    def end(self) -> float:
        """End what still runs and reap it; CPU seconds of all processes. Also after a failed start, and twice."""
        if self.process.returncode is not None:
            return self._spent_s
        if self.pid and self.pid != self.process.pid and not _exited(self.process.pid, 0):
            # The program is killed first, not bubblewrap, so that bubblewrap reaps it: in many containers the first
            # process reaps nothing. It may have done so just now, and be about to end itself.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _exited(self.process.pid, _REAP_S)
        # not reaped yet, so the number is still its own
        (os.killpg if self.whole_group else os.kill)(self.process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self._spent_s = usage.ru_utime + usage.ru_stime
        return self._spent_s

    def close(self) -> None:
        self.end()
        self.gate.close()
        if self.status is not None:
            self.status.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if self._cgroups is not None and self._cgroup is not None:
            self._cgroups.release(self._cgroup)
            self._cgroups = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, deadline_s: float) -> tuple[Ending, bytes, bytes]:
        """Read both pipes until the program ends, the deadline passes or the output exceeds its cap."""
        process, output, errors = self.process, bytearray(), bytearray()
        assert process.stdout is not None and process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, output)
            selector.register(process.stderr, selectors.EVENT_READ, errors)
            while selector.get_map():
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    remaining_s += self.starved_s()
                if remaining_s <= 0:
                    return "wall_time", bytes(output), bytes(errors)
                cpu_left_s = self.limits.cpu_s - self.cpu_s()
                if cpu_left_s <= 0:
                    return "cpu_time", bytes(output), bytes(errors)
                for key, _ in selector.select(min(remaining_s, max(cpu_left_s, CPU_POLL_S))):
                    chunk = os.read(key.fd, CHUNK_BYTES)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif key.data is errors:
                        errors += chunk
                        del errors[:-STDERR_KEPT_BYTES]  # the end of a traceback says most; the flood is drained
                    else:
                        output += chunk
                        if len(output) > self.limits.output_bytes:
                            return "output", bytes(output[: self.limits.output_bytes]), bytes(errors)
        # both pipes can be closed by a process that goes on
        done = _exited(process.pid, max(deadline_s - time.monotonic(), 0))
        return "exited" if done else "wall_time", bytes(output), bytes(errors)

    def cpu_s(self) -> float:
        """CPU time of the sandbox's first process, its threads and the children that it has waited for included."""
        try:
            return time.clock_gettime((~self.pid << 3) | _CPUCLOCK_SCHED)
        except OSError:  # it has ended
            return 0.0

    def starved_s(self) -> float:
        """How long its main thread waited for a processor: a busy machine's time is not the program's.

        Bounded, so that a program that keeps itself waiting, with threads, gains little.
        """
        try:
            waited_s = int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):  # it has ended, or the kernel does not count
            return 0.0
        return min(waited_s, _STARVED_WALLS * self.limits.wall_s)


def specification(rlimits: Mapping[str, int], command: Sequence[str], lock: Mapping[str, Any] | None) -> bytes:
    """The runner's instructions, as ``runner.main`` reads them, whatever Python runs it."""
    return marshal.dumps({"rlimits": dict(rlimits), "command": list(command), "lock": lock}, 2)


def _exited(pid: int, timeout_s: float) -> bool:
    """Whether our child ends within the time; it is not reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
