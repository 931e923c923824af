"""The pool with real workers and real verifiers: order, spread, and what happens when a verifier dies.

Most of it with local processes, which start quickly; what is the Ray actors' own, with these. Deaths are caused by
killing processes from outside; that Ray notices a whole lost node is not shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from math_table import HANGS
from verify_soak import MAY_BE, judged, sample

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.rollout.client import ManagerActor
from or1_megatron.types import Completion, Message, Problem, VersionSpan
from or1_megatron.verify.pool.local import local_workers
from or1_megatron.verify.pool.queue import VerifierPool
from or1_megatron.verify.pool.ray import on_one_node, ray_workers

KINDS = ("local", "ray")
MAKERS = {"local": local_workers, "ray": ray_workers}
PROCESS = {"local": "verify.pool.worker", "ray": "VerifierActor"}

HANG = "</think>" + HANGS[0][1]
"""Against the gold z: it keeps the verifier busy until its time is up."""


def problem(gold: str, ability: str = "math") -> Problem:
    return Problem(f"id{gold}", "s", ability, (Message("user", "q"),), json.dumps([gold]), {}, "x.jsonl:1")


def completion(text: str, truncated: bool = False) -> Completion:
    return Completion(
        problem_id="id",
        sample_index=0,
        token_ids=np.zeros(1, dtype=np.int32),
        log_probs=np.zeros(1, dtype=np.float32),
        text=text,
        finish_reason="length" if truncated else "stop",
        versions=(VersionSpan(0, 0),),
        engine=0,
        seed=0,
        started_s=0.0,
        finished_s=1.0,
    )


def with_pool(
    body: Callable[[VerifierPool], Awaitable[None]],
    workers: int = 2,
    timeout_s: float = 10.0,
    call_timeout_s: float = 60.0,
    kind: str = "local",
    **options: Any,
) -> None:
    async def main() -> None:
        config = VerifyConfig(workers=workers, timeout_s=timeout_s, **options)
        abilities = frozenset({"math"})
        pool = VerifierPool(config, abilities, MAKERS[kind](config, abilities), call_timeout_s)
        try:
            await pool.start()
            await body(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def processes_of(word: str) -> list[psutil.Process]:
    """Living descendants of this process with this word in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # gone, or a zombie, since the listing
            continue
    return found


def test_the_same_verdicts_through_one_two_and_four_workers() -> None:
    """Math and code, right, wrong, cut off, without an answer and hostile, as in the soak."""
    statuses = {workers: asyncio.run(judged(24, workers, "auto", frozenset())).statuses for workers in (1, 2, 4)}
    assert statuses[1] == statuses[2] == statuses[4]
    assert all(status in MAY_BE[sample(number)[2]] for number, status in enumerate(statuses[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_each_caller_gets_its_own_verdict(kind: str, small_ray: None) -> None:
    """200 at once, labels by construction."""

    async def body(pool: VerifierPool) -> None:
        calls = [
            pool.verify(problem(str(n)), completion(rf"</think>\boxed{{{n + n % 3}}}", truncated=n % 5 == 0))
            for n in range(200)
        ]
        verdicts = await asyncio.gather(*calls)
        expected = ["truncated" if n % 5 == 0 else "wrong" if n % 3 else "right" for n in range(200)]
        assert [verdict.status for verdict in verdicts] == expected
        assert pool.retries == 0
        assert pool.pending == 0

    with_pool(body, kind=kind)


def test_one_hang_does_not_hold_up_the_others() -> None:
    async def body(pool: VerifierPool) -> None:
        hang = asyncio.create_task(pool.verify(problem("z"), completion(HANG)))
        await asyncio.sleep(0.05)
        started_s = time.perf_counter()
        verdicts = await asyncio.gather(
            *(pool.verify(problem("1"), completion(r"</think>\boxed{1}")) for _ in range(40))
        )
        assert time.perf_counter() - started_s < 3
        assert not hang.done()
        assert {verdict.status for verdict in verdicts} == {"right"}
        assert (await hang).status == "timeout"

    with_pool(body, workers=2, timeout_s=4.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_verifier_is_replaced_and_its_samples_retried(kind: str, small_ray: None) -> None:
    async def body(pool: VerifierPool) -> None:
        hang = asyncio.create_task(pool.verify(problem("z"), completion(HANG)))
        await asyncio.sleep(1.0)
        (worker,) = processes_of(PROCESS[kind])
        os.kill(worker.pid, signal.SIGKILL)
        assert (await hang).status == "timeout"  # tried again elsewhere, and judged there
        assert pool.retries == 1
        assert (await pool.verify(problem("1"), completion(r"</think>\boxed{1}"))).status == "right"

    with_pool(body, workers=1, timeout_s=4.0, kind=kind)


def test_a_sample_that_fails_twice_is_an_error_and_takes_no_other_along() -> None:
    """The call limit is below the verifier's, so the hanging sample fails both times; its batch-mates do not."""

    async def body(pool: VerifierPool) -> None:
        await pool.verify(problem("1"), completion(r"</think>\boxed{1}"))
        said = [("1", r"</think>\boxed{1}"), ("1", r"</think>\boxed{2}"), ("z", HANG), ("1", r"</think>\boxed{1}")]
        verdicts = await asyncio.gather(*(pool.verify(problem(gold), completion(text)) for gold, text in said))
        assert [verdict.status for verdict in verdicts] == ["right", "wrong", "error", "right"]
        assert verdicts[2].reward == 0.0
        assert "TimeoutError" in verdicts[2].detail
        assert 1 <= pool.retries <= 4

    with_pool(body, workers=1, timeout_s=60.0, call_timeout_s=6.0)


def test_the_group_that_lacks_least_goes_first() -> None:
    async def body(pool: VerifierPool) -> None:
        order: list[str] = []

        async def judge(group: str, size: int) -> None:
            await pool.verify(problem("1"), completion(r"</think>\boxed{1}"), group, size)
            order.append(group)

        busy = asyncio.create_task(pool.verify(problem("z"), completion(HANG)))
        await asyncio.sleep(0.1)
        sizes = {"most": 8, "middle": 5, "least": 2}
        await asyncio.gather(*(judge(group, size) for group, size in sizes.items() for _ in range(2)))
        assert order == ["least", "least", "middle", "middle", "most", "most"]
        assert (await busy).status == "timeout"

    with_pool(body, workers=1, timeout_s=1.0)


def test_more_than_may_wait_wait_outside() -> None:
    async def body(pool: VerifierPool) -> None:
        calls = [asyncio.create_task(pool.verify(problem("1"), completion(r"</think>\boxed{1}"))) for _ in range(50)]
        await asyncio.sleep(0)
        assert pool.pending <= 4
        assert {verdict.status for verdict in await asyncio.gather(*calls)} == {"right"}

    with_pool(body, workers=1, max_pending=4)


def test_a_verifier_that_has_grown_is_replaced_without_losing_a_sample() -> None:
    async def body(pool: VerifierPool) -> None:
        for _ in range(2):
            assert (await pool.verify(problem("1"), completion(r"</think>\boxed{1}"))).status == "right"
        assert pool.recycled >= 1
        assert pool.retries == 0

    with_pool(body, workers=1, worker_memory_bytes=1)


@pytest.mark.parametrize("kind", KINDS)
def test_close_ends_the_workers(kind: str, small_ray: None) -> None:
    async def body(pool: VerifierPool) -> None:
        await pool.verify(problem("x+y"), completion(r"</think>\boxed{y+x}"))
        assert len(processes_of(PROCESS[kind])) == 2
        assert processes_of("verify.math.worker")

    def left() -> list[psutil.Process]:
        return processes_of(PROCESS[kind]) + processes_of("verify.math.worker")

    with_pool(body, kind=kind)
    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []


def test_workers_die_with_a_pool_that_is_killed() -> None:
    """SIGKILL while one is busy with a response that takes a minute: it does not get to see that its input ended.

    The math process that it waits for has a timer of its own, which ends it a second after its limit: here too late.
    """
    source = (
        "import asyncio, sys\nfrom or1_megatron.config.schema import VerifyConfig\nfrom test_pool import *\n"
        "async def body(pool):\n    busy = asyncio.create_task(pool.verify(problem('z'), completion(HANG)))\n"
        "    await asyncio.sleep(0.5)\n"
        "    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)\n"
        "    await busy\nwith_pool(body, workers=2, timeout_s=60.0)\n"
    )
    place = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=place)
    assert owner.stdout is not None
    children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    workers = [child for child in children if "or1_megatron.verify.pool.worker" in child.cmdline()]
    assert len(workers) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE] == []
    for child in set(children) - set(workers):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_on_one_node_the_manager_has_local_workers_and_takes_them_along(small_ray: None) -> None:
    """The RolloutManager, without engines: its verifiers are plain processes, and none stays when it is killed."""
    options = ([], 1, VerifyConfig(workers=2), frozenset({"math"}), {}, 60.0)
    manager = ManagerActor.remote(*options)
    ray.get(manager.start.remote(), timeout=120)
    workers = processes_of("verify.pool.worker")
    assert len(workers) == 2 and not processes_of("VerifierActor")
    ray.kill(manager)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_built_is_refused_at_the_start(kind: str, small_ray: None) -> None:
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
            await pool.verify(problem("1", "code"), completion(""))

    with_pool(body, workers=1)
