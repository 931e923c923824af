"""Starts Ray for a run as its own cluster on this machine, or connects to a running cluster; checks that Ray answers.

When the driver (trainer rank 0) is killed, the kernel ends gcs_server and raylet with it. The workers (engines,
manager, verifiers) follow within about two seconds (measured with Ray 2.60), and Ray's two agents within a minute, or
earlier if the run has a launcher, which ends them. On a cluster that was running before, Ray ends the actors of a job
whose driver is gone; at the next start, ``reap_run`` ends any that are left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from or1_megatron.errors import PartLost
from or1_megatron.interfaces import EnginesLost
from or1_megatron.runtime.timeline import VARIABLE
from or1_megatron.runtime.world import free_ports
from or1_verify.errors import UserError

_OBJECT_STORE_BYTES = 128 << 20  # completions and verdicts only; weights never pass through Ray
_REAP_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
_ALIVE_TIMEOUT_S = 30.0  # deadline for an answer of Ray's own processes, which need a core
CHECK_EVERY_S = 5.0
"""How often a long wait calls ``check_ray``."""
_START_PATIENCE_S = 300.0
START_WAITS = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
"""How long Ray waits for its own processes at a start. The default of 30 to 60 s is too short on a busy machine."""
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_SETTINGS = {
    # Ray waits this long for a starting raylet; between two waits we check that it lives.
    "RAY_raylet_start_wait_time_s": "2",
    # By default 15: beside any other busy program an engine would get 3% of a core.
    "RAY_worker_niceness": "0",
    # By default Ray starts a worker for each core at once. The engines need others, with an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
    # Ray would end engines where a node's memory is nearly used, by checkpoints on their way to the disk too.
    "RAY_memory_monitor_refresh_ms": "0",
}
_HTTP2_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with empty SETTINGS
_SETTINGS_TYPE = b"\x04"

logger = logging.getLogger(__name__)

_services: dict[str, str] = {}  # Ray's head and this node's raylet: "host:port"
_checked_s = 0.0  # when the services were asked last


class ClusterError(UserError, RuntimeError):
    """Ray could not be started or reached."""


class RayDidNotStart(PartLost, ClusterError):
    """Ray did not start on this machine, perhaps because the machine was too busy."""


class RayLost(EnginesLost):
    """Ray's head or this node's raylet is gone or does not answer: no actor can start any more."""


def namespace(run_id: str) -> str:
    """Return the Ray namespace of a run's named actors."""
    return f"or1-{run_id}"


def start_ray(address: str | None, run_id: str) -> None:
    """Connect this process to Ray.

    Args:
        address: None starts a cluster on this machine for this run alone, whatever else runs here and whatever
            RAY_ADDRESS says; "auto" or host:port connects to a running cluster.
        run_id: names the run's actors. Actors that an earlier attempt of the run has left are ended first.

    Raises:
        ClusterError: Ray did not start, or nothing answers at ``address``.
    """
    if ray.is_initialized():
        raise ClusterError("start_ray: this process is connected to Ray already; call stop_ray() first")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {
        "namespace": namespace(run_id),
        "logging_level": "ERROR",
        "log_to_driver": False,  # an actor's errors come back with its answers; its log is in Ray's session folder
    }
    if address is None:
        for name, value in (_SETTINGS | START_WAITS).items():
            os.environ.setdefault(name, value)
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    else:
        _check_answers(address)
        # Ray aborts this process 60 s after its head is gone; on a pre-empted node that is before the ranks have saved.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        recorded = {"env_vars": {VARIABLE: os.environ[VARIABLE]}} if os.environ.get(VARIABLE) else None
        options |= {"address": address, "runtime_env": recorded}
    try:
        with _patient_start() if address is None else contextlib.nullcontext():
            ray.init(**options)
    except Exception as error:  # Ray raises many types here; none says what to do
        if address is None:
            passing = not isinstance(error, OSError) or isinstance(error, ChildProcessError | ConnectionError)
            raise (RayDidNotStart if passing else ClusterError)(
                f"Ray did not start on this machine: {error}. Look for full disks ({tempfile.gettempdir()}, /dev/shm), "
                "used-up process limits and ports blocked on the loopback device; its logs are under "
                f"{tempfile.gettempdir()}/ray/session_latest/logs"
            ) from error
        if "AuthToken" in str(error.__cause__):
            raise ClusterError(
                f"the Ray cluster at cluster.ray_address = '{address}' asks for a token that this process does not "
                "give: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the cluster's token file"
            ) from error
        raise ClusterError(_no_cluster(address, error)) from error
    _find_services()
    if address is not None:
        reap_run(run_id)


@contextlib.contextmanager
def _patient_start() -> Iterator[None]:
    """Within the block, let ``ray.init`` wait up to ``_START_PATIENCE_S`` for the raylet, unless the raylet ends.

    Ray 2.60 gives its raylet 30 s to register, and the raylet ends itself when its agents have not written files with
    their ports within 15 s (ray-project/ray#65983). So the ports are chosen and written before the agents start.
    """
    services, parameters, node = ray._private.services, ray._private.parameter, ray._private.node.Node
    get_node, start_raylet, ray_params = services.get_node, node.start_raylet, parameters.RayParams
    deadline = time.monotonic() + _START_PATIENCE_S
    ports = dict(zip(_AGENT_PORTS, free_ports(len(_AGENT_PORTS)), strict=True))

    def with_port_files(head: Any, *arguments: Any) -> None:
        for name, port in ports.items():
            Path(head.get_session_dir_path(), f"{name}_{head.node_id}").write_text(str(port))
        start_raylet(head, *arguments)

    def registered(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:  # it has not registered yet
                if not _raylet_lives():
                    raise ChildProcessError("its raylet ended") from None
                if time.monotonic() > deadline:
                    raise

    services.get_node, node.start_raylet = registered, with_port_files
    # One node scales nothing, and no driver prints logs: the processes for both would only take time.
    parameters.RayParams = lambda **options: ray_params(**options | ports, include_log_monitor=False, no_monitor=True)
    try:
        yield
    finally:
        services.get_node, node.start_raylet, parameters.RayParams = get_node, start_raylet, ray_params


def _raylet_lives() -> bool:
    children = psutil.Process().children()
    return any(child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE for child in children)


def check_ray(every_s: float = 0.0) -> None:
    """Check that Ray's head and this node's raylet each answer within 30 s.

    Does nothing if the last check was less than ``every_s`` seconds ago. Ray's own calls notice the raylet's death only
    after 15 s. If the head is dead, Ray's own calls wait until Ray aborts this process.

    Raises:
        RayLost: the head or the raylet does not answer.
    """
    global _checked_s
    if time.monotonic() - _checked_s < every_s:
        return
    _checked_s = time.monotonic()
    for name, address in _services.items():
        try:
            speaks_ray = _speaks_grpc(address, _ALIVE_TIMEOUT_S)
        except OSError as error:
            raise RayLost(f"Ray is lost: {name} at {address} does not answer ({error})") from error
        if not speaks_ray:
            raise RayLost(f"Ray is lost: another program than {name} answers at {address}")


def wait_for(calls: Sequence[Any], timeout_s: float) -> list[Any]:
    """Wait until one of the calls has ended, and return all calls that have ended; [] after ``timeout_s``.

    Raises:
        RayLost: Ray is lost, and no call has ended yet.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(calls), num_returns=1, timeout=min(left_s, CHECK_EVERY_S))
        if done or left_s <= CHECK_EVERY_S:
            return list(done)
        check_ray()


def _find_services() -> None:
    context = ray.get_runtime_context()
    own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    _services["Ray's head"] = context.gcs_address
    _services["the raylet"] = f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"


def stop_ray() -> None:
    """Disconnect from Ray. A cluster that ``start_ray`` started is ended with all its processes."""
    _services.clear()
    if ray.is_initialized():
        ray.shutdown()


def wait_for_nodes(count: int, timeout_s: float) -> None:
    """Wait until ``count`` nodes are part of the cluster.

    Raises:
        ClusterError: after ``timeout_s`` fewer than ``count`` nodes have joined.
    """
    deadline = time.monotonic() + timeout_s
    while len(there := [node for node in ray.nodes() if node["Alive"]]) < count:
        if time.monotonic() > deadline:
            names = ", ".join(sorted(node["NodeManagerHostname"] for node in there))
            raise ClusterError(
                f"cluster.nodes = {count}, but after {timeout_s:g} s the Ray cluster has {len(there)} ({names}): start "
                "the others with 'ray start --address=...', or look at why they did not join"
            )
        time.sleep(0.5)


def reap_run(run_id: str, timeout_s: float = _REAP_TIMEOUT_S) -> None:
    """End the actors that an earlier attempt of this run left, and wait until their names are free.

    Raises ClusterError when an actor is still there after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == namespace(run_id)
        ]
        if not left:
            return
        for name in left:
            try:
                ray.kill(ray.get_actor(name, namespace=namespace(run_id)))
            except ValueError:
                pass  # it has ended meanwhile
        if time.monotonic() > deadline:
            raise ClusterError(
                f"actors {sorted(left)} of an earlier attempt of run '{run_id}' are still alive after {timeout_s:g} s"
            )
        time.sleep(0.2)


def _check_answers(address: str) -> None:
    """Raise ClusterError when no Ray cluster answers at the address. (Ray itself would try for minutes.)"""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"cluster.ray_address = '{address}': expected 'auto' or host:port, e.g. 10.0.0.1:6379")
    try:
        speaks_ray = _speaks_grpc(address, _CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ClusterError(_no_cluster(address, error)) from error
    if not speaks_ray:
        raise ClusterError(_no_cluster(address, "another service, which is not Ray, listens there"))


def _speaks_grpc(address: str, timeout_s: float) -> bool:
    """Return whether the service at host:port speaks gRPC, as Ray does. With TLS, any service that listens counts.

    gRPC uses HTTP/2: the server answers the client's opening with a SETTINGS frame (RFC 9113, section 3.4), which
    begins with 3 bytes of length and the type. Raises OSError if nothing answers.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True
        connection.sendall(_HTTP2_OPENING)
        return connection.recv(4)[3:] == _SETTINGS_TYPE


def _no_cluster(address: str, error: Exception | str) -> str:
    return (
        f"no Ray cluster answers at cluster.ray_address = '{address}': {error}. Start one with 'ray start --head' "
        "(port 6379 unless told otherwise), or leave ray_address empty to run on this machine alone"
    )
