"""Starting Ray, and that nothing of it stays. The clusters here belong to subprocesses; pytest's own is another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import ray
from openai_server import serving
from waiting import PATIENCE_S, lives, wait_until

DRIVER = """
import os, sys
import ray
from or1_megatron.rollout import cluster
cluster.start_ray(None, "cluster-test")

@ray.remote(num_cpus=0)
class Sleeper:
    def pid(self):
        return os.getpid()

sleepers = [Sleeper.remote() for _ in range(2)]
ray.get([sleeper.pid.remote() for sleeper in sleepers])
context = ray.get_runtime_context()
print("SESSION", ray._private.worker._global_node.get_session_dir_path(), flush=True)
sys.stdin.readline()
cluster.stop_ray()
"""


def start_driver(**environment: str) -> tuple[subprocess.Popen[str], Path]:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("SESSION"):
            return driver, Path(line.split()[1])
    raise AssertionError("the driver ended before Ray was up")


def session_processes(session: Path) -> list[psutil.Process]:
    """Return those that have a file open under the session's folder, as every process of Ray has its log."""
    holders = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if any(Path(file.path).is_relative_to(session) for file in process.open_files()):
                holders.append(process)
    return holders


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_no_process_survives_the_driver(how: str) -> None:
    """kill -9 of the driver, or stop_ray: raylet, GCS, agents and actors go.

    RAY_ADDRESS names a cluster that does not exist: with address None it must be ignored.
    Does not prove it for a node that loses power, nor for vLLM's own worker processes under tensor parallelism.
    """
    driver, session = start_driver(RAY_ADDRESS="127.0.0.1:1")
    started = session_processes(session)
    assert len(started) >= 5
    if how == "killed":
        driver.send_signal(signal.SIGKILL)
    else:
        driver.communicate("\n", timeout=PATIENCE_S)
        assert driver.returncode == 0
    driver.wait(timeout=PATIENCE_S)
    wait_until(lambda: not any(lives(each.pid) for each in started), "the processes of the session to end", every_s=0.5)
    wait_until(lambda: not session_processes(session), "those that came later to end", every_s=0.5)


def test_actors_have_the_priority_of_the_driver(ray_cluster: None) -> None:
    """At Ray's default niceness of 15 engines nearly stop beside any other busy program."""

    @ray.remote(num_cpus=0)
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert ray.get(niceness.remote()) == os.getpriority(os.PRIO_PROCESS, 0)


def test_unreachable_address_is_a_clear_error() -> None:
    """Nobody listens, or a web server does; Ray itself would try for minutes. In a process of its own: this one may be
    connected to the Ray of other tests."""
    with serving(lambda body: (400, b"")) as url:
        for address, said in (("127.0.0.1:9", "refused"), (urlsplit(url).netloc, "another service, which is not Ray,")):
            code = f"from or1_megatron.rollout import cluster; cluster.start_ray('{address}', 'x')"
            ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
            assert ended.returncode != 0 and said in ended.stderr
            assert f"ClusterError: no Ray cluster answers at cluster.ray_address = '{address}'" in ended.stderr


SLOW_START = """
import sys, threading, time
from contextlib import suppress
import psutil
from or1_megatron.rollout import cluster

def lookup():
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if any(sys.argv[1] in word for word in process.cmdline()[:3]):
                return process

def hold():
    while (process := lookup()) is None:
        time.sleep(0.01)
    process.suspend()
    time.sleep(45)
    process.resume()

threading.Thread(target=hold, daemon=True).start()
cluster.start_ray(None, "slow")
print("up")
cluster.stop_ray()
"""


@pytest.mark.slow
def test_a_start_may_take_longer_than_ray_allows_by_itself() -> None:
    """In each of three starts, at the same time, a process of Ray does nothing for 45 s, as on a busy machine. Ray
    gives up after 15 or 30 s."""
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_START, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for program in ("raylet/raylet", "dashboard/agent.py", "runtime_env/agent/main.py")
    ]
    for start in starts:
        output, errors = start.communicate(timeout=PATIENCE_S)
        assert start.returncode == 0 and "up" in output, errors


def test_a_raylet_that_died_is_not_waited_for() -> None:
    code = SLOW_START.replace("process.suspend()", "process.kill()")
    command = [sys.executable, "-c", code, "raylet/raylet"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "RayDidNotStart: Ray did not start on this machine: its raylet ended" in ended.stderr, ended.stderr


LOSES_RAY = """
import sys
from types import SimpleNamespace
import psutil
from or1_megatron.config.schema import RolloutConfig
from or1_verify.config import VerifyConfig
from or1_megatron.rollout import cluster
from or1_megatron.rollout.client import RolloutsClient
from or1_megatron.types import Sampling
from engine_fixtures import prompt
cluster.start_ray(None, "loses-ray")
no_engines = SimpleNamespace(handles=[])
config = RolloutConfig()
rollouts = RolloutsClient(no_engines, config, VerifyConfig(workers=1), frozenset({"math"}), "loses-ray")
rollouts.allow_restarts(lambda: None, lambda reason: print("REPLACED", flush=True))
cluster.check_ray()
rollouts.roll_out([prompt([2, 5, 27])], 2, Sampling(1.0, 1.0, 8), seed=1)
for child in psutil.Process().children():
    if child.name() in sys.argv[1:]:
        child.kill()
try:
    rollouts.collect()
except Exception as error:
    print("RAISED", type(error).__name__, error, flush=True)
rollouts.close()
cluster.stop_ray()
print("CLOSED")
"""


@pytest.mark.parametrize("dies", [["raylet"], ["raylet", "gcs_server"]], ids=["raylet", "head"])
def test_no_manager_is_awaited_on_a_dead_ray(dies: list[str]) -> None:
    """The manager dies with its raylet. No successor is tried, and what is left can be closed."""
    ended = subprocess.run(
        [sys.executable, "-c", LOSES_RAY, *dies],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert "RAISED RayLost Ray is lost: " in ended.stdout, ended.stdout + ended.stderr[-3000:]
    assert "REPLACED" not in ended.stdout
    assert "CLOSED" in ended.stdout
