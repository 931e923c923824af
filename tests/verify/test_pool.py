"""The pool with real workers and real verifiers: order, spread, and what happens when a verifier dies.

Most tests use local processes, which start quickly; what concerns Ray actors runs with both. Where a worker must hang
or die at a known point, a verifier of the user's (``DEADLY``) waits for a file or kills its worker, so that nothing
depends on how fast the machine is. Not shown: that Ray notices a whole lost node.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from math_table import HANGS
from waiting import PATIENCE_S

from or1_megatron.rollout import verifier_actors
from or1_megatron.rollout.client import ManagerActor
from or1_megatron.rollout.verifier_actors import on_one_node, ray_workers
from or1_verify.config import VerifyConfig
from or1_verify.pool import local
from or1_verify.pool.local import LocalWorker
from or1_verify.pool.queue import VerifierPool, Worker, WorkerLost
from or1_verify.types import Attempt, Message, Problem, Verdict

KINDS = ("local", "ray")
MAKERS = {"local": lambda *settings: partial(LocalWorker, *settings), "ray": ray_workers}
PROCESS = {"local": "or1_verify.pool.pool_process", "ray": "VerifierActor"}
MATH = "or1_verify.math.math_process"

HANG = "</think>" + HANGS[0][1]
"""Against the gold z, with ``MATH_VERIFY``: it keeps the verifier busy until its time is up."""

MATH_VERIFY = {"judge": "math_verify"}

RIGHT = r"</think>\boxed{1}"
"""Against the gold 1."""

DEADLY = """
import os, signal, time
from pathlib import Path

def judge(problem, response, truncated):
    what, _, file = response.partition(" ")
    if what == "wait":
        Path(file + ".begun").touch()
        while not os.path.exists(file): time.sleep(0.01)
    elif what == "kill" or not os.path.exists(file):
        if what == "once": Path(file).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return 1
"""
"""For ability "deadly": "wait FILE" ends when the file is there; "kill" kills the worker, "once FILE" does so once."""


def problem(gold: str, ability: str = "math") -> Problem:
    return Problem(f"id{gold}", "s", ability, (Message("user", "q"),), json.dumps([gold]), {}, "x.jsonl:1")


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The custom verifier's configuration; workers of either kind find its module."""
    (tmp_path / "deadly_verifier.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    return {"deadly": "deadly_verifier:judge"}


def with_pool(
    body: Callable[[VerifierPool], Awaitable[None]],
    workers: int = 2,
    timeout_s: float = 200.0,
    call_timeout_s: float = 200.0,
    kind: str = "local",
    abilities: frozenset[str] = frozenset({"math"}),
    **options: Any,
) -> None:
    async def main() -> None:
        config = VerifyConfig(workers=workers, timeout_s=timeout_s, **options)
        judged = abilities | config.custom.keys()
        make: Callable[[], Worker] = partial(LocalWorker, config, judged)
        if kind == "ray":
            place = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            make = ray_workers(config, judged, {"runtime_env": {"env_vars": place}} if config.custom else None)
        pool = VerifierPool(config, judged, make, call_timeout_s)
        try:
            await pool.start()
            await body(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 280))


def processes_of(word: str) -> list[psutil.Process]:
    """Living descendants of this process with this word in their command line."""
    results = []
    for process in psutil.Process().children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                results.append(process)
        except psutil.Error:  # gone, or a zombie, since the listing
            continue
    return results


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that do not end within a minute; zombies have ended."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


CODE = json.dumps({"inputs": ["21\n"], "outputs": ["42\n"]})
SAMPLES = [  # ability, ground truth, response, status
    ("math", '["x+y"]', r"</think>\boxed{y+x}", "right"),
    ("math", '["x+y"]', r"</think>\boxed{y-x}", "wrong"),
    ("math", '["x+y"]', r"<think>\boxed{y+x}", "no_answer"),
    ("math", '["x+y"]', r"</think>\boxed{" + "9^{" * 40 + "9" + "}" * 41, "wrong"),
    ("code", CODE, "</think>\n```python\nprint(int(input()) * 2)\n```", "right"),
    ("code", CODE, "</think>\n```python\nprint(7)\n```", "wrong"),
    ("code", CODE, "</think>no program", "no_answer"),
    ("code", CODE, "</think>\n```python\nimport os\nos.kill(-1, 9)\nos._exit(0)\n```", "wrong"),
]


def test_the_same_verdicts_through_one_two_and_four_workers() -> None:
    """Math and code: right, wrong, without an answer, hostile and cut off."""
    expected = [status for *_, status in SAMPLES] * 2 + ["truncated"] * len(SAMPLES)

    async def body(pool: VerifierPool) -> None:
        attempts = [
            (Problem("p", "s", ability, (Message("user", "q"),), truth, {}, "x.jsonl:1"), text, truncated)
            for truncated in (False, False, True)
            for ability, truth, text, _ in SAMPLES
        ]
        calls = [pool.verify(*attempt) for attempt in attempts]
        assert [verdict.status for verdict in await asyncio.gather(*calls)] == expected

    for workers in (1, 2, 4):
        with_pool(body, workers, 20.0, abilities=frozenset({"math", "code"}), memory_bytes=512 << 20, processes=32)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_verdicts_are_judged_again(kind: str, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips in the first message that arrives after the worker has started."""
    flipped = []

    def flip(packed: bytes) -> bytes:
        if started and not flipped:
            flipped.append(len(packed))
            packed = packed[:-2] + bytes([packed[-2] ^ 4]) + packed[-1:]
        return packed

    async def body(pool: VerifierPool) -> None:
        started.append(True)
        verdicts = [await pool.verify(problem("1"), text, False) for text in (RIGHT, "</think>no")]
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]
        assert flipped and pool.retries == 1

    started: list[bool] = []
    at, unpack = (verifier_actors, verifier_actors.unpack) if kind == "ray" else (local, local.unpack)
    monkeypatch.setattr(at, "unpack", lambda packed: unpack(flip(packed)))
    with_pool(body, workers=1, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_each_caller_gets_its_own_verdict(kind: str, ray_cluster: None) -> None:
    """200 at once, labels by construction."""

    async def body(pool: VerifierPool) -> None:
        calls = [
            pool.verify(problem(str(n)), rf"</think>\boxed{{{n + n % 3}}}", truncated=n % 5 == 0) for n in range(200)
        ]
        verdicts = await asyncio.gather(*calls)
        expected = ["truncated" if n % 5 == 0 else "wrong" if n % 3 else "right" for n in range(200)]
        assert [verdict.status for verdict in verdicts] == expected
        assert pool.retries == 0

    with_pool(body, kind=kind)


def test_one_hang_does_not_hold_up_the_others(deadly: dict[str, str], tmp_path: Path) -> None:
    async def body(pool: VerifierPool) -> None:
        file = tmp_path / "go"
        hang = asyncio.create_task(pool.verify(problem("1", "deadly"), f"wait {file}", False))
        verdicts = await asyncio.gather(*(pool.verify(problem("1"), RIGHT, False) for _ in range(40)))
        assert {verdict.status for verdict in verdicts} == {"right"}
        assert not hang.done()
        file.touch()
        assert (await hang).status == "right"

    with_pool(body, workers=2, custom=deadly)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_verifier_is_replaced_and_its_samples_retried(
    kind: str, deadly: dict[str, str], tmp_path: Path, ray_cluster: None
) -> None:
    async def body(pool: VerifierPool) -> None:
        killed = await pool.verify(problem("1", "deadly"), f"once {tmp_path / 'was here'}", False)
        assert killed.status == "right"  # tried again elsewhere, and judged there
        assert pool.retries == 1
        assert (await pool.verify(problem("1"), RIGHT, False)).status == "right"

    with_pool(body, workers=1, kind=kind, custom=deadly)


def test_a_sample_that_fails_twice_is_an_error_and_takes_no_other_along(deadly: dict[str, str]) -> None:
    """It kills its worker both times; the others are judged."""

    async def body(pool: VerifierPool) -> None:
        said = [("deadly", "kill"), ("math", RIGHT), ("math", r"</think>\boxed{2}"), ("math", RIGHT)]
        verdicts = await asyncio.gather(*(pool.verify(problem("1", ability), text, False) for ability, text in said))
        assert [verdict.status for verdict in verdicts] == ["error", "right", "wrong", "right"]
        assert verdicts[0].reward == 0.0
        assert "failed twice: WorkerLost: the verifier's process ended" in verdicts[0].detail
        assert pool.retries == 1

    with_pool(body, workers=1, custom=deadly)


def test_a_call_that_takes_too_long_is_ended() -> None:
    """The call's limit is below the verifier's own, so that the pool has to end it."""

    async def body(pool: VerifierPool) -> None:
        verdict = await pool.verify(problem("z"), HANG, False)
        assert verdict.status == "error" and "TimeoutError" in verdict.detail

    with_pool(body, workers=1, call_timeout_s=1.0, math=MATH_VERIFY)


@pytest.mark.parametrize("kind", KINDS)
def test_close_ends_the_workers(kind: str, ray_cluster: None) -> None:
    started: list[psutil.Process] = []

    async def body(pool: VerifierPool) -> None:
        await pool.verify(problem("x+y"), r"</think>\boxed{y+x}", False)
        started.extend(processes_of(PROCESS[kind]) + processes_of(MATH))
        assert len(started) == 4

    with_pool(body, kind=kind)
    assert still_alive(started) == []


class Gated:
    """``queue.Worker`` whose method ``at`` waits for ``gate``. The first of two is lost, so that the second gets ready
    within the pool."""

    made = 0

    def __init__(self, at: str, gate: asyncio.Future[None], reached: asyncio.Event) -> None:
        self.at, self.gate, self.reached = at, gate, reached
        self.is_first = Gated.made == 0
        Gated.made += 1

    async def pass_gate(self, name: str) -> None:
        if name == self.at and not self.is_first:
            self.reached.set()
            await self.gate

    async def ready(self) -> None:
        await self.pass_gate("ready")

    async def verify(self, attempt: Attempt) -> Verdict:
        if self.is_first:
            raise WorkerLost("it is gone")
        await self.pass_gate("verify")
        return Verdict(1.0, "right", "", "", 0.0)

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("at", ["ready", "verify"])
def test_close_ends_whatever_answer_comes_just_then(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``close`` begins some turns of the event loop after a worker has become ready or has judged.

    A ``close`` that hangs ends in TimeoutError.
    """

    async def main(turns: int) -> None:
        gate, reached = asyncio.get_running_loop().create_future(), asyncio.Event()
        monkeypatch.setattr(Gated, "made", 0)
        pool = VerifierPool(VerifyConfig(workers=1), frozenset({"math"}), lambda: Gated(at, gate, reached))
        await pool.start()
        call = asyncio.create_task(pool.verify(problem("1"), RIGHT, False))
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        gate.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await pool.close()
        call.cancel()

    for turns in range(6):
        asyncio.run(main(turns))


def test_nothing_outlives_a_pool_that_is_killed() -> None:
    """SIGKILL while one worker is busy with a response that takes minutes, so that it cannot see that its input ended.

    Nor can the math process that it waits for, which dies with it.
    """
    source = (
        "import asyncio\nfrom test_pool import *\n"
        "def busy_one():\n    spent_s = [process.cpu_times().user for process in processes_of(MATH)]\n"
        "    return max(spent_s) - min(spent_s) > 1\n"
        "async def body(pool):\n    busy = asyncio.create_task(pool.verify(problem('z'), HANG, False))\n"
        "    await until(lambda: len(processes_of(MATH)) == 2)\n    await until(busy_one)\n"
        "    print(*(p.pid for p in processes_of('-m or1_verify')), flush=True)\n"
        "    await busy\nwith_pool(body, math=MATH_VERIFY)\n"
    )
    place = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=place)
    assert owner.stdout is not None
    children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert len(children) == 4
    assert still_alive(children) == []


def test_on_one_node_the_manager_has_local_workers_and_takes_them_along(ray_cluster: None) -> None:
    """The RolloutManager, without engines: its verifiers are plain processes, and none stays when it is killed."""
    options = ([], 1, VerifyConfig(workers=2), frozenset({"math"}), 60.0)
    manager = ManagerActor.remote(*options)
    ray.get(manager.start.remote(), timeout=PATIENCE_S)
    workers = processes_of(PROCESS["local"])
    assert len(workers) == 2 and not processes_of(PROCESS["ray"])
    ray.kill(manager)
    assert still_alive(workers) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_built_is_refused_at_the_start(kind: str, ray_cluster: None) -> None:
    async def main() -> None:
        config, abilities = VerifyConfig(), frozenset({"cooking"})
        pool = VerifierPool(config, abilities, MAKERS[kind](config, abilities))
        try:
            with pytest.raises(RuntimeError, match=r"no verifier for ability \['cooking'\]"):
                await pool.start()
        finally:
            await pool.close()

    asyncio.run(main())
    assert on_one_node()


def test_an_ability_that_the_pool_lacks_is_refused() -> None:
    async def body(pool: VerifierPool) -> None:
        with pytest.raises(ValueError, match=r"x\.jsonl:1: ability 'code'"):
            await pool.verify(problem("1", "code"), "", False)

    with_pool(body, workers=1)
