"""Launchers on several nodes start their ranks together and end them together: real launchers and torchrun agents.

The nodes are processes of this machine, each with one small rank. Not proven here: several hosts (the slow
examples/test_recipe_scripts.py), and that trainer ranks go on from their checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ports import unused_port
from waiting import PATIENCE_S, lives, wait_until

from or1_megatron.runtime.nodes import Nodes, NodesError
from or1_verify.errors import UserError

RANK = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (folder / f"{rank}.asked").touch())  # and does not end
attempt = len(list(folder.glob(f"{rank}.*.up")))
up = folder / f"{rank}.{attempt}.up"
up.with_suffix(".part").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']}")
up.with_suffix(".part").rename(up)
while not (folder / f"{rank}.{attempt}.go").exists():
    time.sleep(0.05)
sys.exit(int((folder / f"{rank}.{attempt}.go").read_text()))
"""

LAUNCHER = """
import sys
from or1_verify.errors import UserError
from or1_megatron.runtime import nodes
from or1_megatron.runtime.launch import launch
nodes._GRACE_S, nodes._SILENT_S = 1.5, float(sys.argv[4])
def attempt():
    ended = launch("or1_node_rank", sys.argv[3:4], ranks=1, threads_per_rank=1, grace_s=5.0, nodes=group)
    print(ended.rank_code, ended.code, ended.how, flush=True)
    return ended.rank_code
try:
    with nodes.Nodes(2, int(sys.argv[1]), "127.0.0.1", int(sys.argv[2]), 120.0) as group:
        while group.begin():
            if attempt() == 0 and group.rank == 0:
                break
except UserError as error:
    print(error, flush=True)
    sys.exit(2)
"""


class TwoNodes:
    """Two launchers with a rank each, in a folder."""

    def __init__(self, folder: Path, silent_s: float) -> None:
        (folder / "or1_node_rank.py").write_text(RANK)
        self.folder, self.port, self.silent_s = folder, unused_port(), silent_s
        self.launchers = [self.start(node) for node in (0, 1)]

    def start(self, node: int) -> subprocess.Popen[str]:
        """A launcher; torch's own warnings, with stacks at times, go to a file beside the ranks' files."""
        path = os.pathsep.join(part for part in (str(self.folder), os.environ.get("PYTHONPATH", "")) if part)
        with (self.folder / f"{node}.stderr").open("ab") as stderr:
            return subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(node), str(self.port), str(self.folder), str(self.silent_s)],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def pid(self, rank: int, attempt: int) -> int:
        """The pid of a rank, once it is up; it knows of both."""
        up = self.folder / f"{rank}.{attempt}.up"
        wait_until(up.exists, f"rank {rank}")
        pid, world = up.read_text().split()
        assert world == "2"
        return int(pid)

    def finish(self, rank: int, attempt: int, code: int = 0) -> None:
        (self.folder / f"{rank}.{attempt}.go").write_text(str(code))

    def end(self, node: int) -> tuple[int, list[str]]:
        output, _ = self.launchers[node].communicate(timeout=PATIENCE_S)
        return self.launchers[node].returncode, output.splitlines()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Callable[..., TwoNodes]]:
    made: list[TwoNodes] = []

    def make(silent_s: float = 600.0) -> TwoNodes:
        made.append(TwoNodes(tmp_path, silent_s))
        return made[-1]

    yield make
    for group in made:
        for launcher in group.launchers:
            launcher.kill()
            launcher.wait()
        for up in tmp_path.glob("*.up"):
            if psutil.pid_exists(pid := int(up.read_text().split()[0])):
                os.kill(pid, signal.SIGKILL)


def wait_gone(pid: int) -> None:
    wait_until(lambda: not lives(pid), f"process {pid} to end")


def test_all_ranks_start_again_after_one_has_failed(two_nodes: Callable[..., TwoNodes]) -> None:
    """Both launchers know how the first rank ended: rank 1 exits with 2, then is killed while rank 0 waits for ever."""
    nodes = two_nodes()
    for rank in (0, 1):
        nodes.pid(rank, 0)
    nodes.finish(1, 0, code=2)
    pids = [nodes.pid(rank, 1) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    wait_gone(pids[0])
    for rank in (0, 1):
        nodes.pid(rank, 2)
        nodes.finish(rank, 2)
    for node in (0, 1):
        code, said = nodes.end(node)
        assert code == 0, said
        assert len(said) == 3, said
        assert said[0].startswith("2 2 rank 1 (pid "), said
        assert re.match(rf"-9 137 rank 1 \(pid {pids[1]}\) was killed by SIGKILL .*\(node 1\)$", said[1]), said
        assert said[2] == "0 0 ", said
    assert (nodes.folder / "0.asked").exists()  # of node 0, when rank 1 of node 1 had failed


def test_launchers_are_lost(two_nodes: Callable[..., TwoNodes]) -> None:
    """Node 1's is stopped, as a host that is switched off looks, and then comes back; then node 0's is killed."""
    nodes = two_nodes(silent_s=6.0)
    pids = [nodes.pid(rank, 0) for rank in (0, 1)]
    nodes.launchers[1].send_signal(signal.SIGSTOP)
    wait_gone(pids[0])
    assert nodes.launchers[0].stdout is not None
    assert nodes.launchers[0].stdout.readline() == "-9 137 the launcher of node 1 gave no sign of life for 6 s\n"

    nodes.launchers[1].kill()
    os.kill(pids[1], signal.SIGKILL)
    nodes.launchers[1].wait()
    nodes.launchers[1] = nodes.start(1)
    pids = [nodes.pid(rank, 1) for rank in (0, 1)]
    nodes.launchers[0].kill()
    code, lines = nodes.end(1)
    assert code == 2
    assert "the launcher of node 0 at 127.0.0.1:" in lines[-1] and "is gone" in lines[-1]
    wait_gone(pids[1])


def test_another_node_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("or1_megatron.runtime.nodes._LEAVE_S", 0.0)  # nobody is there to be told of the end
    with Nodes(3, 0, "127.0.0.1", unused_port(), PATIENCE_S) as nodes:
        nodes.timeout_s = 0.5
        with pytest.raises(NodesError, match=r"of node 1, 2 has come"):
            nodes.begin()


def test_another_node_cannot_start_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("or1_megatron.runtime.nodes._LEAVE_S", 0.0)
    port = unused_port()
    with Nodes(2, 0, "127.0.0.1", port, PATIENCE_S) as nodes:
        with pytest.raises(UserError), Nodes(2, 1, "127.0.0.1", port, PATIENCE_S):
            raise UserError("the disk is full")
        with pytest.raises(UserError, match="node 1 could not start its ranks: the disk is full") as raised:
            nodes.begin()
        assert not isinstance(raised.value, NodesError)  # it comes again on every start


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_service_is_where_node_0_should_be(greeting: bytes) -> None:
    """One that says nothing would hold torch for ever."""
    held = []  # connections, open to the end

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed at the end
            while True:
                held.append(server.accept()[0])
                held[-1].sendall(greeting)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        expected = r"did not reach node 0 at 127.0.0.1:\d+ .*: another service than its launcher listens there \("
        with pytest.raises(NodesError, match=expected + ("" if greeting else "it says nothing")):
            Nodes(2, 1, "127.0.0.1", server.getsockname()[1], 1.0)


def test_all_nodes_end_as_node_0_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 has refused the run (2); the launcher of node 1, whose ranks ended with 0, ends with 2."""
    monkeypatch.setattr("or1_megatron.runtime.nodes._LEAVE_S", PATIENCE_S)
    port, codes = unused_port(), []

    def follow() -> None:
        with Nodes(2, 1, "127.0.0.1", port, PATIENCE_S) as nodes:
            while nodes.begin():
                pass
            codes.append(nodes.code)

    other = threading.Thread(target=follow)
    other.start()
    with Nodes(2, 0, "127.0.0.1", port, PATIENCE_S) as nodes:
        nodes.begin()
        nodes.code = 2
    other.join()
    assert codes == [2]


def test_node_0_is_not_there_or_its_port_is_taken() -> None:
    port = unused_port()
    with pytest.raises(NodesError, match=rf"node 1 did not reach node 0 at 127.0.0.1:{port} .* within 1 s"):
        Nodes(2, 1, "127.0.0.1", port, 1.0)
    with Nodes(1, 0, "127.0.0.1", port, PATIENCE_S), pytest.raises(NodesError, match=f"cannot listen at .*:{port}"):
        Nodes(2, 0, "127.0.0.1", port, PATIENCE_S)
