"""Simulates several hosts by Linux namespaces: each has its own network, processes, host name and shared memory.

The hosts share the file system, as nodes share their storage. Needs root, network namespaces and ``ip``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import pytest

ENTER = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """``count`` simulated hosts on one switch, at 10.77.0.1, 10.77.0.2, ...; skips the test if that is not possible."""

    def __init__(self, count: int) -> None:
        self._names = [f"or1-{os.getpid()}-{index}" for index in range(count)]
        self._switch = f"or1-{os.getpid()}-switch"
        self._folder = Path(tempfile.mkdtemp(prefix="or1h"))  # Ray's sockets lie in it: a path must be short
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("cannot pretend hosts here (needs root and iproute2)")
        try:
            self._connect()
        except subprocess.CalledProcessError as error:
            self._remove()
            pytest.skip(f"cannot pretend hosts here: {error.stderr.decode().strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()  # the first process of a host's namespace dies with it, and so do all others in there
            process.wait()
        self._remove()

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], output: IO[str]
    ) -> subprocess.Popen[str]:
        """Start a command on a host; when it ends, all processes that it has started end."""
        enter = ["nsenter", f"--net=/run/netns/{self._names[index]}"]
        enter += ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        enter += ["bash", "-c", ENTER, "host", f"node{index}", str(self._folder / "hosts")]
        temporary = self._folder / str(index)
        temporary.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [*enter, *command],
            env={**os.environ, **environment, "RAY_TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Drop all packets between the hosts; the hosts' own interfaces stay up."""
        ip("-n", self._switch, "link", "set", "switch", "down")

    def join(self) -> None:
        ip("-n", self._switch, "link", "set", "switch", "up")

    def _connect(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        self.join()
        lines = ["127.0.0.1 localhost"]
        for index, name in enumerate(self._names):
            ip("netns", "add", name)
            ip("-n", self._switch, "link", "add", f"port{index}", "type", "veth", "peer", "eth0", "netns", name)
            ip("-n", self._switch, "link", "set", f"port{index}", "master", "switch", "up")
            ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            lines.append(f"{self.address(index)} node{index}")
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
