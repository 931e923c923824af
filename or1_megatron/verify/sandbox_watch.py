"""The outside of one run, the same for every tier: wait until it is confined, let it go, read, limit, end it."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from io import FileIO

from or1_megatron.verify.program import Ending, SandboxFailure, SandboxLimits, SandboxResult

_SET_UP_S = 60.0
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
    pid: int = 0
    """Of the sandbox's first process; all others end with it. Known once it waits at the gate."""

    def wait_at_gate(self) -> None:
        """Until the program is confined. Raises SandboxFailure with what was written instead."""
        self.gate.settimeout(_SET_UP_S)
        try:
            arrived = self.gate.recv(1)
        except TimeoutError:
            raise SandboxFailure(f"the sandbox was not set up within {_SET_UP_S:.0f} s") from None
        if not arrived:
            assert self.process.stderr is not None
            readable, _, _ = select.select([self.process.stderr], [], [], _REAP_S)
            errors = os.read(self.process.stderr.fileno(), CHUNK_BYTES) if readable else b""
            raise SandboxFailure(errors.decode("utf-8", "replace").strip()[-STDERR_KEPT_BYTES:] or "it ended at once")
        self.pid = self.process.pid
        if self.status is not None:
            self.pid = json.loads(self.status.read(CHUNK_BYTES).splitlines()[0])["child-pid"]

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
        """End what still runs: how it ended as far as the kernel's limits say, exit status, CPU seconds."""
        cpu_s = self.end()
        status = self.process.returncode
        return "cpu_time" if cpu_s >= self.limits.cpu_s else "exited", 128 - status if status < 0 else status, cpu_s

    def end(self) -> float:
        """End what still runs and reap it; CPU seconds of all processes. Also after a failed start, and twice."""
        if self.process.returncode is not None:
            return 0.0
        if self.pid and self.pid != self.process.pid and not _exited(self.process.pid, 0):
            # The program is killed first, not bubblewrap, so that bubblewrap reaps it: in many containers the first
            # process reaps nothing.
            os.kill(self.pid, signal.SIGKILL)
            _exited(self.process.pid, _REAP_S)
        os.kill(self.process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        self.end()
        self.gate.close()
        if self.status is not None:
            self.status.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

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


def _exited(pid: int, timeout_s: float) -> bool:
    """Whether our child ends within the time; it is not reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
