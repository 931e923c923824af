"""Coordinates the launchers of a multi-node run: they start and end all ranks together, at a port that node 0 chooses.

Each node runs ``or1 train``. Node 0's launcher hosts a small store (torch's TCPStore) at MASTER_ADDR:MASTER_PORT. This
launcher decides whether there is another attempt (a start of all ranks), and the other launchers follow. An attempt
begins once the launchers of all nodes wait for it. The store's keys:

    begun         the number of the attempt that began last
    here/<i>/<node>  set when the node's launcher waits for attempt i
    attempt/<i>   the port of node 0 at which the ranks of attempt i meet. If the run has ended before attempt i: "end"
                  and the run's exit code
    ended/<i>     how the first rank of attempt i failed: two exit codes and a line. Every node then ends its ranks
    beat/<node>   a counter that the node's launcher advances once a second
    left/<node>   set when the node has read that the run has ended
    error/<node>  why the node's launcher could not start its ranks
"""

from __future__ import annotations

import datetime
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist

from or1_megatron.errors import PartLost
from or1_megatron.runtime.world import free_ports
from or1_verify.errors import UserError

_POLL_S: Final = 0.2
_LOOK_S: Final = 1.0
_GRACE_S: Final = 10.0
"""Time for this node's ranks to log their stacks and end after a rank of another node has failed."""
_ANSWER_S: Final = 5.0
_SILENT_S: Final = 60.0
"""A node whose launcher has not advanced its counter for this long is lost. Network drop-outs are shorter."""
_LEAVE_S: Final = 10.0
"""Node 0 waits this long for the other nodes to read that the run has ended."""
_END: Final = "end"


class NodesError(PartLost):
    """The launchers of a run do not meet, or have lost each other. The message names the node and the address."""


class Nodes:
    """Connects this node's launcher with the launchers of the other nodes. Use it from one thread.

    Args:
        count: the number of nodes that have ranks.
        rank: this node's number. Node 0 decides when an attempt begins.
        address, port: node 0's address, and a free port on node 0.
        timeout_s: how long node 0 waits for the other nodes, and how long these wait for an answer of node 0.

    Raises:
        NodesError: node 0 does not answer in time, or cannot listen at its port.
    """

    def __init__(self, count: int, rank: int, address: str, port: int, timeout_s: float) -> None:
        self.count, self.rank, self.address, self.timeout_s = count, rank, address, timeout_s
        self.port = 0
        """The port of node 0 at which the ranks of this attempt meet."""
        self._store_port = port
        self._where = f"{address}:{port}"
        self._attempt = -1
        self.code = 1
        """The run's exit code, equal on all nodes. Node 0 sets it before the ``with`` block ends, and ``begin`` sets it
        on the other nodes. 1: node 0's launcher ended with an error."""
        place = f"{self._where} (--master-addr, --master-port)"
        try:
            if rank == 0:  # the store listens at all addresses of this host
                self._store = self._made("127.0.0.1", host=True)
        except dist.DistError as error:
            raise NodesError(f"node 0 cannot listen at {place}: {_first_line(error)}") from None
        try:
            if rank > 0:
                self._store = self._connected()
            self._own = self._connected()  # for the watching thread: a waiting call would block other calls
        except (dist.DistError, TimeoutError) as error:
            late = f"within {timeout_s:g} s (cluster.join_timeout_s)"
            raise NodesError(f"node {rank} did not reach node 0 at {place} {late}: {self._found(error)}") from None

    def _connected(self) -> dist.TCPStore:
        """Return a connection to node 0's store. A thread makes it, because a silent service blocks torch for ever.

        Raises DistError when the store refuses, TimeoutError when nothing answers in time.
        """
        made: Future[dist.TCPStore] = Future()

        def make() -> None:
            try:
                made.set_result(self._made(self.address, host=False))
            except dist.DistError as error:
                made.set_exception(error)

        threading.Thread(target=make, name="meet", daemon=True).start()
        return made.result(self.timeout_s + _LOOK_S)

    def _found(self, error: Exception) -> str:
        """Return what listens at node 0's address, for a message. ``error``: why the store could not be reached."""
        try:
            socket.create_connection((self.address, self._store_port), _ANSWER_S).close()
        except OSError as refused:
            return str(refused)
        return f"another service than its launcher listens there ({_first_line(error) or 'it says nothing'})"

    def _made(self, address: str, host: bool) -> dist.TCPStore:
        timeout = datetime.timedelta(seconds=self.timeout_s)
        return dist.TCPStore(address, self._store_port, None, host, timeout, wait_for_workers=False)

    def begin(self) -> bool:
        """Begin the next attempt together with the launchers of all nodes. Return False if the run has ended.

        Node 0 waits ``timeout_s`` for the other nodes. The other nodes wait as long as node 0 lives. A node whose
        launcher was started again joins the attempt that follows the running attempt.

        Raises:
            NodesError: another node has not come in time (on node 0), or node 0 is gone (on the other nodes).
            UserError: another node cannot start its ranks (on node 0).
        """
        if self.rank > 0:
            try:
                return self._follow()
            except dist.DistError:
                raise NodesError(f"the launcher of node 0 at {self._where} is gone; this node ends") from None
        self._wait_for_others()
        self._attempt += 1
        (self.port,) = free_ports(1)
        self._store.set("begun", str(self._attempt))
        self._store.set(f"attempt/{self._attempt}", str(self.port))
        return True

    def _follow(self) -> bool:
        """Begin the next attempt on a node other than 0. Return False if the run has ended."""
        begun = int(self._store.get("begun")) if self._store.check(["begun"]) else -1
        self._attempt = begun + 1
        self._store.set(f"here/{self._attempt}/{self.rank}", "1")
        while not self._store.check([key := f"attempt/{self._attempt}"]):
            time.sleep(_POLL_S)
        said = self._store.get(key).decode()
        if said.startswith(_END):
            self.code = int(said.removeprefix(_END))
            self._store.set(f"left/{self.rank}", "1")
            return False
        self._store.set(f"beat/{self.rank}", f"{self._attempt}.0")
        self.port = int(said)
        return True

    def _wait_for_others(self) -> None:
        """Wait until the launchers of all nodes wait for the next attempt. A signal handler may raise here."""
        give_up = time.monotonic() + self.timeout_s
        while missing := self._missing():
            for node in missing:
                if self._store.check([key := f"error/{node}"]):
                    raise UserError(f"node {node} could not start its ranks: {self._store.get(key).decode()}")
            if time.monotonic() > give_up:
                raise NodesError(
                    f"no launcher of node {', '.join(map(str, missing))} has come to {self._where} within "
                    f"{self.timeout_s:g} s (cluster.join_timeout_s); run the same command on all nodes to go on"
                )
            time.sleep(_POLL_S)

    def _missing(self) -> list[int]:
        """Return the nodes, other than node 0, whose launchers do not yet wait for the next attempt."""
        here = f"here/{self._attempt + 1}"
        return [node for node in range(1, self.count) if not self._store.check([f"{here}/{node}"])]

    def first_failure(self, rank_code: int, code: int, how: str) -> tuple[int, int, str]:
        """Report how this node's ranks failed (``launch.Ended``), and return the report that came first."""
        own = f"{rank_code} {code} {how} (node {self.rank})"
        try:
            first: str = self._store.compare_set(f"ended/{self._attempt}", "", own).decode()
        except dist.DistError:
            first = own
        codes = first.split(" ", 2)
        return int(codes[0]), int(codes[1]), codes[2]

    @contextmanager
    def watched(self, terminate: Callable[[], None], kill: Callable[[], object]) -> Iterator[None]:
        """Watch the other nodes on a thread during the block. When the attempt has failed on another node, the thread
        calls ``terminate``, and ``kill`` if the block still runs ``_GRACE_S`` later."""
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over, terminate, kill), name="nodes", daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join(2 * _LOOK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """On node 0, tell the other nodes that the run has ended. On another node, report a UserError to node 0."""
        if self.rank == 0:
            self._end()
        elif isinstance(error, UserError) and not isinstance(error, NodesError):
            self._store.set(f"error/{self.rank}", str(error))

    def _end(self) -> None:
        """Tell the other nodes that the run has ended, and wait up to ``_LEAVE_S`` until they have read it."""
        self._store.set(f"attempt/{self._attempt + 1}", f"{_END} {self.code}")
        give_up = time.monotonic() + _LEAVE_S
        while not self._store.check([f"left/{node}" for node in range(1, self.count)]) and time.monotonic() < give_up:
            time.sleep(_POLL_S)

    def _watch(self, over: threading.Event, terminate: Callable[[], None], kill: Callable[[], object]) -> None:
        beats: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not over.wait(_LOOK_S):
            count += 1
            try:
                self._own.set(f"beat/{self.rank}", f"{self._attempt}.{count}")
                failed = self._own.check([f"ended/{self._attempt}"]) or self._lost(beats)
            except dist.DistError:
                failed = True  # node 0's launcher is gone
            if failed:
                terminate()
                if not over.wait(_GRACE_S):
                    kill()
                return

    def _lost(self, beats: dict[int, tuple[bytes, float]]) -> bool:
        """On node 0, return whether another node's launcher stopped counting. That node is then reported as failed."""
        now = time.monotonic()
        for node in range(1, self.count) if self.rank == 0 else ():
            beat = self._own.get(f"beat/{node}") if self._own.check([f"beat/{node}"]) else b""
            if beats.get(node, (None, now))[0] != beat:
                beats[node] = (beat, now)
            elif beat and now - beats[node][1] > _SILENT_S:
                self._own.compare_set(
                    f"ended/{self._attempt}",
                    "",
                    f"{-signal.SIGKILL} {128 + signal.SIGKILL} the launcher of node {node} gave no sign of life for "
                    f"{_SILENT_S:g} s",
                )
                return True
        return False


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
