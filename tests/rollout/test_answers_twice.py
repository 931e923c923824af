"""Engines that answer twice, late or never while others take over new weights, through the real manager.

Ray and the verifiers are real. The engines say what the test tells them to, so that events have the same order on every
machine. Real engines in a whole run: train/test_in_flight_over_handoffs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from engine_fixtures import RUN_ID, answer, prompt, rollout_config
from waiting import PATIENCE_S

from or1_megatron.rollout.client import RolloutsClient
from or1_megatron.rollout.engine_thread import Harvest
from or1_megatron.rollout.manager import RolloutError, RolloutManager
from or1_megatron.rollout.request_plan import plan_requests
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Completion, Request, Sampling
from or1_verify.config import VerifyConfig

SAMPLING = Sampling(1.0, 1.0, 8)
PROMPTS = [prompt([2, 5 + index], name=f"p{index}", answer='["7"]') for index in range(3)]
GROUP = 2


def start_engine() -> Any:
    class Told:  # in here, so that Ray's workers need not import this file
        """Takes requests, and answers ``harvest`` with what it is told to say, in this order."""

        def __init__(self) -> None:
            self.requests: list[Any] = []
            self.seeds: set[int] = set()
            self.harvests: asyncio.Queue[bytes] = asyncio.Queue()

        async def submit(self, requests: bytes, caller: int) -> None:
            for request in unpack(requests):
                assert request.seed not in self.seeds, "this was requested before"
                self.seeds.add(request.seed)
                self.requests.append(request)

        async def harvest(self, wait_s: float, keep: bool, caller: int) -> bytes:
            return await self.harvests.get()

        async def forget(self, seeds: list[int]) -> None:
            """Forget nothing: the manager calls it after each rollout."""

        async def say(self, harvest: bytes) -> None:
            await self.harvests.put(harvest)

        async def take(self) -> bytes:
            """Return the requests that came since the last call."""
            taken, self.requests = self.requests, []
            return pack(taken)

    return ray.remote(Told).options(num_cpus=0).remote()


async def taken(engines: Sequence[Any], count: int) -> list[list[Request]]:
    """Wait until these engines have been given so many further requests together, and return each one's."""
    found: list[list[Request]] = [[] for _ in engines]
    async with asyncio.timeout(PATIENCE_S):
        while sum(map(len, found)) < count:
            for of_engine, engine in zip(found, engines, strict=True):
                of_engine += unpack(await engine.take.remote())
    assert sum(map(len, found)) == count
    return found


async def say(engine: Any, completions: Sequence[Completion]) -> None:
    await engine.say.remote(pack(Harvest(tuple(completions), 0.0)))


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def managed(engines: list[Any]) -> Any:
    """A manager over these engines; those that are added to the list are ended with it."""
    manager = RolloutManager(engines, 16, VerifyConfig(workers=1), frozenset({"math"}), PATIENCE_S)
    await manager.start()
    try:
        yield manager
    finally:
        await manager.close()
        for engine in engines:
            ray.kill(engine, no_restart=True)


def batch(seed: int) -> bytes:
    return pack({"prompts": PROMPTS, "group_size": GROUP, "sampling": SAMPLING, "seed": seed})


async def collect(manager: RolloutManager, seed: int) -> dict[int, tuple[int, ...]]:
    """Return the versions of each response's tokens, by the seed of its request; they are those of the plan."""
    groups, report = unpack(await manager.collect(None))
    made = [completion for group in groups for completion in group.completions]
    assert [group.prompt.problem.id for group in groups] == [each.problem.id for each in PROMPTS]
    assert report.surplus_responses == 0 and report.response_tokens == sum(c.token_ids.size for c in made)
    assert all([span.version for span in c.versions] == c.token_ids.tolist() for c in made)
    found = {c.seed: tuple(c.token_ids.tolist()) for c in made}
    assert list(found) == [request.seed for request in plan_requests(PROMPTS, GROUP, SAMPLING, seed).values()]
    return found


def test_an_answer_that_is_given_twice_ends_the_roll_out(ray_cluster: None) -> None:
    """Engine 1 answers, after a handoff, what engine 0 has answered: the rollout fails and names it. What a checkpoint
    takes along has the first answer, once."""

    async def run() -> None:
        engines = [start_engine() for _ in range(2)]
        async with managed(engines) as manager:
            await manager.roll_out(batch(1))
            (first, *_), _ = await taken(engines, 6)
            await say(engines[0], [answer(first, 0, 4)])
            await until(lambda: finished(manager, 1))
            await say(engines[1], [answer(first, 1, 4, 5)])
            name = f"sample {first.sample_index} of problem {first.prompt.problem.id}"
            said = f"engine 1 finished a response that was not requested: {name}"
            with pytest.raises(RolloutError, match=said):
                await manager.collect(None)
            with pytest.raises(RolloutError, match=said):
                await manager.roll_out(batch(2))
            kept = unpack(await manager.finished_responses())
            assert [(each.seed, each.token_ids.tolist()) for each in kept] == [(first.seed, [4])]

    asyncio.run(run())


async def finished(manager: RolloutManager, count: int) -> bool:
    return (await manager.progress())[0] == count


async def is_lost(manager: RolloutManager) -> bool:
    return list(await manager.lost_engines()) == [0]


async def has_ended(manager: RolloutManager, drains: int) -> bool:
    """Whether so many engines are listened to."""
    return sum(task.get_coro().__name__ == "_drain" for task in manager._tasks) == drains  # type: ignore[union-attr]


def test_dead_engine_ends_the_roll_out_with_its_name(ray_cluster: None) -> None:
    """Where nobody can start another."""
    engine, run_id = start_engine(), f"{RUN_ID}-dies"
    pool: Any = SimpleNamespace(handles=[engine])
    client = RolloutsClient(pool, rollout_config(), VerifyConfig(workers=1), frozenset({"math"}), run_id)
    client.roll_out(PROMPTS, GROUP, SAMPLING, seed=3)
    ray.kill(engine, no_restart=True)
    with pytest.raises(RolloutError, match="engine 0 died during the rollout"):
        client.collect()
    client.close()


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_an_engine_is_lost_over_a_handoff(ray_cluster: None, how: str) -> None:
    """Engine 0 has answered none, some or all of its three requests when it dies, or stalls and is replaced; then the
    others take over version 5. What it has not answered they sample, once each. An engine that had only stalled answers
    all of it after its successor has come: nothing of that is used. Four rollouts, each with another engine 0."""

    async def run() -> None:
        engines = [start_engine() for _ in range(2)]
        async with managed(engines) as manager:
            old, other = engines
            for answered in range(4):
                await manager.roll_out(batch(answered))
                lost, kept = await taken([old, other], 6)
                await say(old, [answer(each, 0, 4) for each in lost[:answered]])
                await until(lambda count=answered: finished(manager, count))
                engines.append(successor := start_engine())
                if how == "dies":
                    ray.kill(old, no_restart=True)
                    await until(lambda: is_lost(manager))
                await manager.engines_restarted([successor, other])
                if how == "stalls":
                    await say(old, [answer(each, 0, 4) for each in lost])
                    await until(lambda: has_ended(manager, drains=2))
                moved, more = await taken([successor, other], len(lost) - answered)
                assert {each.seed for each in moved + more} == {each.seed for each in lost[answered:]}
                await say(successor, [answer(each, 0, 5) for each in moved])
                await say(other, [answer(each, 1, 4, 5) for each in kept] + [answer(each, 1, 5) for each in more])
                made = await collect(manager, answered)
                for requests, versions in ((lost[:answered], (4,)), (moved + more, (5,)), (kept, (4, 5))):
                    assert all(made.pop(each.seed) == versions for each in requests)
                assert not made
                old = successor

    asyncio.run(run())


def test_requests_on_their_way_to_a_lost_engine_do_not_reach_its_successor(ray_cluster: None) -> None:
    """Engine 0 is replaced in the moment between the decision to send it requests and the call: its successor gets them
    once, since they are planned anew."""

    async def run() -> None:
        engines = [start_engine() for _ in range(2)]
        async with managed(engines) as manager:
            await manager.roll_out(batch(1))
            engines.append(successor := start_engine())
            await manager.engines_restarted([successor, engines[1]])  # no call was made yet: neither method waits
            of_engine = await taken([successor, engines[1]], 6)
            for index, engine in enumerate([successor, engines[1]]):
                await say(engine, [answer(each, index, 5) for each in of_engine[index]])
            assert set((await collect(manager, 1)).values()) == {(5,)}

    asyncio.run(run())
