"""The scheduler on a clock, without engines: every request is answered once, whatever dies when.

The real manager's part, to do what the scheduler asks for, is tested with real engines (test_manager).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from engine_fixtures import prompt

from or1_megatron.rollout.request_plan import plan_requests
from or1_megatron.rollout.scheduler import Abort, Action, Judge, Scheduler, Submit
from or1_megatron.rollout.simulated_engine import EngineClock
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.types import Completion, DeferRule, Group, Prompt, RefillRule, Request, Sampling, Verdict, VersionSpan

ENGINES = 4
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_tokens=8)


def right(group: Group) -> bool:
    return bool(group.rewards[0])


def prompts(count: int, name: str = "p") -> list[Prompt]:
    return [prompt([2], name=f"{name}{index}") for index in range(count)]


class Turmoil:
    """Engines that finish, abort, die and come back in a drawn order, and a verifier that answers in a drawn order."""

    def __init__(self, rng: np.random.Generator, deaths: float) -> None:
        self.rng, self.deaths = rng, deaths
        self.scheduler = Scheduler(ENGINES, max_concurrent=8)
        self.has: list[dict[int, Request]] = [{} for _ in range(ENGINES)]
        self.asked: list[tuple[int, list[int]]] = []  # aborts under way
        self.verifying: list[Judge] = []
        self.answered = Counter[int]()  # by seed
        self.died = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Submit(engine, requests):
                    assert engine not in self.scheduler.lost and len(self.has[engine]) + len(requests) <= 9
                    for request in requests:
                        assert not any(request.seed in has for has in self.has), "two engines have one request"
                        assert not self.answered[request.seed], "a request was sent after its answer"
                        self.has[engine][request.seed] = request
                case Abort(engine, seeds):
                    self.asked.append((engine, seeds))
                case Judge():
                    self.answered[action.completion.seed] += 1
                    self.verifying.append(action)

    def step(self) -> None:
        """Let one thing happen."""
        lost, events = self.scheduler.lost, [self.finish] * 6 + [self.judge] * 3 + [self.abort]
        if self.rng.random() < self.deaths:
            events = [self.die if len(lost) < ENGINES - 1 else self.come_back, self.come_back]
        events[int(self.rng.integers(len(events)))]()

    def finish(self) -> None:
        engine = int(self.rng.integers(ENGINES))
        some = [seed for seed in self.has[engine] if self.rng.random() < 0.3]
        self.perform(self.scheduler.finished(engine, [answer(self.has[engine].pop(seed), engine) for seed in some]))

    def judge(self) -> None:
        if self.verifying:
            judged = self.verifying.pop(int(self.rng.integers(len(self.verifying))))
            is_right = judged.completion.seed % 5 < 3
            verdict = Verdict(float(is_right), "right" if is_right else "wrong", "", "", 0.0)
            self.perform(self.scheduler.judged(judged.ticket, judged.key, verdict))

    def abort(self) -> None:
        if self.asked:
            engine, seeds = self.asked.pop(0)
            self.perform(
                self.scheduler.aborted(engine, [seed for seed in seeds if self.has[engine].pop(seed, None) is not None])
            )

    def die(self) -> None:
        engine = int(self.rng.integers(ENGINES))
        self.has[engine].clear()
        self.asked = [(other, seeds) for other, seeds in self.asked if other != engine]
        self.died += engine not in self.scheduler.lost
        self.perform(self.scheduler.lose(engine))

    def come_back(self) -> None:
        lost = sorted(self.scheduler.lost)
        if lost:
            self.perform(self.scheduler.rejoin(lost[: int(self.rng.integers(1, len(lost) + 1))]))

    def run(self, ticket: int) -> list[Group]:
        for _ in range(100_000):
            if self.scheduler.at(ticket).judged and self.scheduler.off_engines(ticket):
                return self.scheduler.end(ticket).result()
            self.step()
        raise AssertionError("the roll-out does not come to its end")


def answer(request: Request, engine: int) -> Completion:
    none = np.zeros(0)
    spans = (VersionSpan(0, 0),)
    ids, log_probs = none.astype(np.int32), none.astype(np.float32)
    problem, sample = request.prompt.problem.id, request.sample_index
    return Completion(problem, sample, ids, log_probs, "", "stop", spans, engine, request.seed, 0.0, 0.0)


@pytest.mark.parametrize("deaths", [0.0, 0.02, 0.2])
def test_every_request_is_answered_once_whatever_dies(deaths: float) -> None:
    """60 drawn histories of three roll-outs at once, some with refill and some that defer prompts: results
    are those of the plan, no request is ever with two engines or answered twice, and nothing is left."""
    for history in range(20):
        world = Turmoil(np.random.default_rng([history, int(100 * deaths)]), deaths)
        scheduler, rng = world.scheduler, world.rng
        open_ones = []
        for number in range(3):
            asked = prompts(int(rng.integers(1, 12)), f"r{number}_")
            defer = DeferRule(int(rng.integers(1, len(asked) + 1)))
            rule = (None, RefillRule(3, right), defer)[int(rng.integers(3))]
            ticket, actions = scheduler.begin(asked, 3, SAMPLING, seed=history * 3 + number, rule=rule)
            world.perform(actions)
            open_ones.append((ticket, asked, rule, history * 3 + number))
            for _ in range(int(rng.integers(20))):
                world.step()
        for ticket, asked, rule, seed in open_ones:
            groups = world.run(ticket)
            planned = plan_requests(asked, 3, SAMPLING, seed)
            places = [asked.index(group.prompt) for group in groups]
            if isinstance(rule, DeferRule):
                assert places == sorted(places) and len(places) == rule.groups
            else:
                assert places == list(range(len(groups))) and (rule is not None or len(groups) == len(asked))
            for index, group in zip(places, groups, strict=True):
                assert [c.seed for c in group.completions] == [planned[index, sample].seed for sample in range(3)]
        assert max(world.answered.values(), default=1) == 1
        assert not any(world.has) and all(scheduler.engine_of(seed) is None for seed in world.answered)
        assert (world.died > 0) == (deaths > 0) or deaths == 0.02


def test_an_answer_to_what_was_not_asked() -> None:
    """A second answer, an answer to another engine's request, and a second verdict are errors; a lost engine's answer
    is dropped."""
    scheduler = Scheduler(2, 8)
    ticket, actions = scheduler.begin(prompts(2), 1, SAMPLING, 1)
    sent = {action.engine: action.requests[0] for action in actions if isinstance(action, Submit)}
    with pytest.raises(ValueError, match="engine 1 finished a response that was not requested: sample 0 of problem p0"):
        scheduler.finished(1, [answer(sent[0], 1)])
    (judge,) = scheduler.finished(0, [answer(sent[0], 0)])
    assert isinstance(judge, Judge)
    with pytest.raises(ValueError, match="engine 0 finished a response that was not requested"):
        scheduler.finished(0, [answer(sent[0], 0)])
    scheduler.judged(ticket, judge.key, Verdict(1.0, "right", "", "", 0.0))
    with pytest.raises(ValueError, match="has no completion or a verdict already"):
        scheduler.judged(ticket, judge.key, Verdict(1.0, "right", "", "", 0.0))
    (again,) = scheduler.lose(1)
    assert again == Submit(0, [sent[1]]) and scheduler.finished(1, [answer(sent[1], 1)]) == []
    with pytest.raises(ValueError, match="gives two requests the same seed"):
        scheduler.begin(prompts(2), 1, SAMPLING, 1)


def test_deferring_takes_the_first_whole_groups() -> None:
    """Two of three prompts of two samples wanted; lengths 2 and 9, 4 and 4, 3 and 3, at 1 s a token and room for all.
    At 4 s the last two are whole, in the order of the prompts; the second response to p0 is given up, the first is
    thrown away. At their old place p0's responses have their old seeds."""
    lengths = {("p0", 0): 2, ("p0", 1): 9, ("p1", 0): 4, ("p1", 1): 4, ("p2", 0): 3, ("p2", 1): 3}
    world = SimulatedRollouts(
        1, EngineClock(8, fixed_s=1.0), lambda request: lengths[request.prompt.problem.id, request.sample_index]
    )
    world.roll_out(prompts(3), 2, Sampling(1.0, 1.0, 16), 5, DeferRule(2))
    first = world.scheduler.at(1).requests
    groups, report = world.collect()
    assert [group.prompt.problem.id for group in groups] == ["p1", "p2"] and report.prompts == (1, 2)
    assert world.now_s == 4.0 and report.surplus_responses == 2 and not world.engines[0].seeds
    world.roll_out(prompts(1), 2, Sampling(1.0, 1.0, 16), 6, places=[(5, 0)])
    (again,) = world.collect()[0]
    assert [c.seed for c in again.completions] == [first[0, sample].seed for sample in range(2)]


def test_what_two_lost_engines_had_does_not_stand_in_the_way() -> None:
    """3 of 8 prompts wanted, one sample each, four engines with one place. After engines 0 and 3 are lost, in this
    order, prompts 0 and 3 wait; 1, 2 and 4 are right, so that 3 may not be needed, and 0 is sampled all the same."""
    scheduler = Scheduler(4, 1)
    ticket, actions = scheduler.begin(prompts(8), 1, SAMPLING, 1, RefillRule(3, right))
    held = {a.engine: list(a.requests) for a in actions if isinstance(a, Submit)}
    assert {engine: sent[0].prompt.problem.id for engine, sent in held.items()} == {n: f"p{n}" for n in range(4)}
    for engine in (0, 3):
        for action in scheduler.lose(engine):
            assert isinstance(action, Submit)
            held[action.engine] += action.requests
    seen = []
    for _ in range(8):
        for engine in (1, 2):
            if scheduler.at(ticket).judged or not held[engine]:
                continue
            request = held[engine].pop(0)
            seen.append(request.prompt.problem.id)
            for action in scheduler.finished(engine, [answer(request, engine)]):
                match action:
                    case Submit(to, requests):
                        held[to] += requests
                    case Judge(_, key, _):
                        for more in scheduler.judged(ticket, key, Verdict(1.0, "right", "", "", 0.0)):
                            match more:
                                case Submit(to, requests):
                                    held[to] += requests
                                case Abort(of, seeds):
                                    held[of] = [each for each in held[of] if each.seed not in seeds]
                                    scheduler.aborted(of, seeds)
    assert scheduler.at(ticket).judged and len(scheduler.end(ticket).result()) == 3 and "p0" in seen


def fixed(lengths: dict[str, int]) -> SimulatedRollouts:
    """One engine with two places; an iteration takes 1 s alone, 2 s with two."""
    return SimulatedRollouts(1, EngineClock(2, response_s=1.0), lambda request: lengths[request.prompt.problem.id])


def test_the_simulated_clock_by_hand() -> None:
    """Lengths 2, 3, 4, and T = 4. The first two decode at 2 s a token: at 4 s the first ends and the third begins; at
    6 s the second ends, when the third has 1 token; alone it needs 1 s for each of 3 more: 9 s."""
    world = fixed({"p0": 2, "p1": 3, "p2": 4})
    world.roll_out(prompts(3), 1, Sampling(1.0, 1.0, 4), 1)
    world.wait_decoded()
    groups, report = world.collect()
    completions = [group.completions[0] for group in groups]
    assert [c.finished_s for c in completions] == [4.0, 6.0, 9.0] and [c.started_s for c in completions] == [0, 0, 4]
    assert [(len(c.token_ids), c.truncated) for c in completions] == [(2, False), (3, False), (4, True)]
    assert (report.decode_s, report.wall_s, report.response_tokens) == (9.0, 9.0, 9)
    world.spend(5.0)
    assert world.now_s == 14.0 and world.engines[0].decoded == 9


def test_a_simulated_handoff_and_death() -> None:
    """Lengths 4 and 8 at 2 s a token: after 4 s both have 2 tokens, the handoff takes 1 s; at 9 s the first ends; the
    second then has 4 of 8 and dies; it starts again and needs 8 s more."""
    world = fixed({"p0": 4, "p1": 8})
    world.roll_out(prompts(2), 1, Sampling(1.0, 1.0, 16), 1)
    world.spend(4.0)
    world.hand_off(1, 1.0)
    world.spend(4.0)
    world.lose(0)
    world.rejoin(0)
    groups, report = world.collect()
    spans = [[(span.version, span.first_token) for span in g.completions[0].versions] for g in groups]
    assert spans == [[(0, 0), (1, 2)], [(1, 0)]] and world.now_s == 17.0
    assert report.engine_busy_s == (16.0,)
