"""The scheduler on a clock, without engines: every request is answered once, whatever dies or stalls when.

The real manager's part, to do what the scheduler asks for, is tested with real engines (test_manager).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from engine_fixtures import prompt

from or1_megatron.rollout.continued import generator_seed, read_tokens, tokens_before
from or1_megatron.rollout.request_plan import plan_requests
from or1_megatron.rollout.scheduler import Abort, Action, Judge, Scheduler, Submit
from or1_megatron.rollout.simulated_engine import EngineClock
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.types import (
    Completion,
    DeferRule,
    Group,
    Prompt,
    RefillRule,
    Request,
    Sampling,
    Unfinished,
    Verdict,
    VersionSpan,
)

ENGINES = 4
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_tokens=8)


def right(group: Group) -> bool:
    return bool(group.rewards[0])


def prompts(count: int, name: str = "p") -> list[Prompt]:
    return [prompt([2], name=f"{name}{index}") for index in range(count)]


@dataclass
class Decoding:
    """A request that an engine has, and the version of each token sampled so far."""

    request: Request
    versions: list[int]

    @classmethod
    def of(cls, request: Request) -> Decoding:
        return cls(request, [] if request.before is None else request.before.token_ids.tolist())


class Turmoil:
    """Engines that sample, take over new weights, finish, abort, stall, die and come back in a drawn order, and a
    verifier that answers in a drawn order. The id of a token is the version that sampled it.

    In trouble an engine also answers twice. One that has stalled takes requests until it is missed; then it is lost,
    and answers late. What it says once its successor serves is dropped by the manager (test_answers_twice).
    """

    def __init__(self, rng: np.random.Generator, troubles: float) -> None:
        self.rng, self.troubles = rng, troubles
        self.scheduler = Scheduler(ENGINES, max_concurrent=8)
        self.version = 0
        self.has: list[dict[int, Decoding]] = [{} for _ in range(ENGINES)]
        self.stalled: set[int] = set()
        self.late: list[tuple[int, Decoding]] = []  # what an engine had that was lost and only stalled
        self.asked: list[tuple[int, list[int]]] = []  # aborts under way
        self.verifying: list[Judge] = []
        self.answered = Counter[int]()  # by seed
        self.made: dict[int, Completion] = {}  # by seed: the answer of the engine that had the request
        self.known: dict[int, Completion] = {}  # not sampled again
        self.unfinished: dict[int, Unfinished] = {}  # goes on from there
        self.sent: set[int] = set()
        self.cut: list[Unfinished] = []
        self.happened = Counter[str]()

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Submit(engine, requests):
                    assert engine not in self.scheduler.lost and len(self.has[engine]) + len(requests) <= 9
                    for request in requests:
                        assert not any(request.seed in has for has in self.has), "two engines have one request"
                        assert not self.answered[request.seed], "a request was sent after its answer"
                        self.has[engine][request.seed] = Decoding.of(request)
                        self.sent.add(request.seed)
                        assert request.before is self.unfinished.get(request.seed)
                    known = {each.seed: self.known[each.seed] for each in requests if each.seed in self.known}
                    self.made |= known
                    for seed in known:
                        del self.has[engine][seed]
                    self.perform(self.scheduler.finished(engine, known.values()))
                case Abort(engine, seeds):
                    self.asked.append((engine, seeds))
                case Judge():
                    self.answered[action.completion.seed] += 1
                    self.verifying.append(action)

    def step(self) -> None:
        """Let one thing happen."""
        lost = self.scheduler.lost
        events = [self.finish] * 6 + [self.judge] * 3 + [self.sample] * 3
        events += [self.abort, self.hand_off, self.miss, self.answer_late]
        if self.rng.random() < self.troubles:
            spare = len(lost | self.stalled) < ENGINES - 1
            events = [self.die, self.stall] if spare else [self.come_back]
            events += [self.come_back, self.answer_twice]
        events[int(self.rng.integers(len(events)))]()

    def sample(self) -> None:
        engine = int(self.rng.integers(ENGINES))
        if engine not in self.stalled:
            for each in self.has[engine].values():
                each.versions += [self.version] * int(self.rng.integers(1, 4))

    def finish(self) -> None:
        engine = int(self.rng.integers(ENGINES))
        some = [seed for seed in self.has[engine] if self.rng.random() < 0.3 and engine not in self.stalled]
        made = [self.last_token(engine, self.has[engine].pop(seed)) for seed in some]
        self.made |= {each.seed: each for each in made}
        self.perform(self.scheduler.finished(engine, made))

    def last_token(self, engine: int, each: Decoding) -> Completion:
        return answer(each.request, engine, [*each.versions, self.version])

    def hand_off(self) -> None:
        """Nothing is aborted. An engine that has stalled does not keep up, and is lost."""
        while self.stalled:
            self.miss()
        self.version += 1
        self.happened["in flight over a handoff"] += sum(map(len, self.has))

    def judge(self) -> None:
        if self.verifying:
            judged = self.verifying.pop(int(self.rng.integers(len(self.verifying))))
            is_right = judged.completion.seed % 5 < 3
            verdict = Verdict(float(is_right), "right" if is_right else "wrong", "", "", 0.0)
            self.perform(self.scheduler.judged(judged.ticket, judged.key, verdict))

    def abort(self) -> None:
        for engine, seeds in [asked for asked in self.asked if asked[0] not in self.stalled][:1]:
            self.asked.remove((engine, seeds))
            found = [self.has[engine].pop(seed) for seed in seeds if seed in self.has[engine]]
            self.cut += (unfinished := [cut(each.request, each.versions) for each in found])
            self.perform(self.scheduler.aborted(engine, unfinished))

    def stall(self) -> None:
        engine = int(self.rng.integers(ENGINES))
        if engine not in self.scheduler.lost:
            self.stalled.add(engine)

    def miss(self) -> None:
        """Lose an engine that has stalled."""
        for engine in sorted(self.stalled)[:1]:
            late = [(engine, each) for each in self.has[engine].values()]
            self.lose(engine)
            self.late += late
            self.happened["missed"] += 1

    def die(self) -> None:
        self.happened["died"] += self.lose(int(self.rng.integers(ENGINES)))

    def lose(self, engine: int) -> bool:
        """Return whether it was there."""
        was_there = engine not in self.scheduler.lost
        self.has[engine].clear()
        self.stalled.discard(engine)
        self.forget({engine})
        self.perform(self.scheduler.lose(engine))
        return was_there

    def forget(self, engines: set[int]) -> None:
        """Nothing that these processes have been asked or have to say comes any more."""
        self.asked = [asked for asked in self.asked if asked[0] not in engines]
        self.late = [late for late in self.late if late[0] not in engines]

    def come_back(self) -> None:
        lost = sorted(self.scheduler.lost)
        if lost:
            back = lost[: int(self.rng.integers(1, len(lost) + 1))]
            self.forget(set(back))
            self.perform(self.scheduler.rejoin(back))

    def answer_late(self) -> None:
        if self.late:
            engine, each = self.late.pop(int(self.rng.integers(len(self.late))))
            if self.rng.random() < 0.5:
                assert self.scheduler.finished(engine, [self.last_token(engine, each)]) == []
            else:
                self.perform(self.scheduler.aborted(engine, [cut(each.request, each.versions)]))
            self.happened["answered late"] += 1

    def answer_twice(self) -> None:
        """An engine answers what it does not have: what it or another has answered, or another will answer."""
        engine = int(self.rng.integers(ENGINES))
        with_others = (each for other, has in enumerate(self.has) if other != engine for each in has.values())
        answers = [*self.made.values(), *(self.last_token(engine, each) for each in with_others)]
        if answers and engine not in self.scheduler.lost:
            again = answers[int(self.rng.integers(len(answers)))]
            if again.seed not in self.has[engine]:
                with pytest.raises(ValueError, match=f"engine {engine} finished a response that was not requested"):
                    self.scheduler.finished(engine, [again])
                self.happened["answered twice"] += 1

    def run(self, ticket: int) -> list[Group]:
        """Return the result; each response in it is the one that the engine with its request has made."""
        for _ in range(100_000):
            if self.scheduler.at(ticket).judged and self.scheduler.off_engines(ticket):
                groups = self.scheduler.end(ticket).result()
                made = [completion for group in groups for completion in group.completions]
                assert all(completion is self.made[completion.seed] for completion in made)
                self.happened["of several versions"] += sum(len(completion.versions) > 1 for completion in made)
                return groups
            self.step()
        raise AssertionError("the roll-out does not come to its end")


NOTHING = np.zeros(0, np.int32), np.zeros(0, np.float32)


def answer(request: Request, engine: int, versions: Sequence[int] = (0,)) -> Completion:
    """A response whose tokens are of these versions, and have them as ids."""
    ids, log_probs = np.array(versions, np.int32), np.ones(len(versions), np.float32)
    problem, sample = request.prompt.problem.id, request.sample_index
    return Completion(problem, sample, ids, log_probs, "", "stop", spans_of(versions), engine, request.seed, 0.0, 0.0)


def cut(request: Request, versions: Sequence[int]) -> Unfinished:
    """What an engine returns of a request that is given up with tokens of these versions, which are their ids."""
    made = np.array(versions, dtype=np.int32)
    return Unfinished(request.seed, made, made.astype(np.float32), spans_of(versions), 0.0)


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    starts = [index for index, version in enumerate(versions) if index == 0 or versions[index - 1] != version]
    return tuple(VersionSpan(versions[index], index) for index in starts)


@pytest.mark.parametrize("deaths", [0.0, 0.02, 0.2])
def test_every_request_is_answered_once_whatever_dies(deaths: float) -> None:
    """60 drawn histories of three roll-outs at once, some with refill and some that defer prompts, with handoffs under
    requests in flight: results are those of the plan, each response is as its engine made it, with its versions, no
    request is ever with two engines or answered twice, and nothing is left. A second answer changes nothing, nor does a
    lost engine's late one. Not proven: that engines tell versions truly (handoff/test_in_flight)."""
    happened = Counter[str]()
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
        happened += world.happened
    of_trouble = {"died", "missed", "answered late", "answered twice"}
    assert happened.keys() == {"in flight over a handoff", "of several versions", *(of_trouble if deaths else ())}
    assert min(happened.values()) > 10


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


@pytest.mark.parametrize("deaths", [0.0, 0.05, 0.2])
def test_kept_responses_are_continued_and_neither_lost_nor_doubled(deaths: float) -> None:
    """40 drawn histories of two roll-outs: of 8 prompts 5 are taken, and the 3 others are the next one's first. What
    was sampled of them is kept, of each response once, unless its engine died with it. Every request that goes on from
    tokens does so on whichever engine it comes to, keeps them and their versions, and is finished once."""
    continued = 0
    for history in range(40):
        world = Turmoil(np.random.default_rng([history, int(100 * deaths)]), deaths)
        scheduler, asked = world.scheduler, prompts(8)
        ticket, actions = scheduler.begin(asked, 3, SAMPLING, 1, DeferRule(5, keep=True))
        world.perform(actions)
        first = scheduler.at(ticket)
        world.run(ticket)
        kept = {each.seed: each for each in first.kept()}
        assert len(kept) == len(first.kept())
        left = [index for index in range(8) if index not in first.budget.result]
        of_left = {request.seed for (index, _), request in first.requests.items() if index in left}
        assert kept.keys() <= of_left and len(left) == 3
        assert all(kept[seed].token_ids.size for seed in kept)
        sampled = {made.seed for key, made in first.completions.items() if key[0] in left}
        assert sampled <= {seed for seed, each in kept.items() if isinstance(each, Completion)}
        if not deaths:
            never_sent = {request.seed for request in first.requests.values()} - world.sent
            gave_nothing = {each.seed for each in world.cut if not each.token_ids.size}
            assert of_left - kept.keys() == of_left & (never_sent | gave_nothing)
        world.answered.clear()
        world.unfinished = {seed: each for seed, each in kept.items() if isinstance(each, Unfinished)}
        world.known = {seed: each for seed, each in kept.items() if isinstance(each, Completion)}
        new = prompts(4, "n")
        places = [(1, index) for index in left] + [(2, index) for index in range(4)]
        ticket, actions = scheduler.begin(
            [*(asked[index] for index in left), *new],
            3,
            SAMPLING,
            2,
            DeferRule(5, 3, True),
            places,
            False,
            world.unfinished,
        )
        requests = scheduler.at(ticket).requests
        assert {each.seed: each.before for each in requests.values() if each.before is not None} == world.unfinished
        continued += len(world.unfinished)
        world.perform(actions)
        second = scheduler.at(ticket)
        groups = world.run(ticket)
        assert list(second.budget.result)[:3] == [0, 1, 2] and len(groups) == 5
        of_old = {c.seed: c for group in groups[:3] for c in group.completions}
        assert of_old.keys() == of_left
        for seed, each in world.unfinished.items():
            before, whole = each.token_ids.tolist(), of_old[seed].token_ids.tolist()
            assert whole[: len(before)] == before and len(whole) > len(before)
        assert max(world.answered.values()) == 1 and not any(world.has)
    assert continued > 20


def test_a_continued_roll_out_by_hand() -> None:
    """At 1 s a token and room for all. Two of p0 (2 and 9 tokens), p1 (4, 4) and p2 (3, 3) are wanted: at 4 s p0 is
    given up, with its first response and 4 tokens of the second. After a handoff of 1 s the next step takes p0 and one
    of p3 (20, 20), p4 (2, 2), p5 (3, 3): p4 is whole at 7 s, p5 at 8 s, p0 after 5 more tokens at 10 s. p5 is kept
    whole, p3 with 5 tokens each; in the step after, p3 needs 15 more."""
    lengths = {"p0": (2, 9), "p1": (4, 4), "p2": (3, 3), "p3": (20, 20), "p4": (2, 2), "p5": (3, 3)}
    clock = EngineClock(16, fixed_s=1.0)
    world = SimulatedRollouts(1, clock, lambda request: lengths[request.prompt.problem.id][request.sample_index])
    sampling, asked = Sampling(1.0, 1.0, 32), prompts(6)
    world.roll_out(asked[:3], 2, sampling, 5, DeferRule(2, keep=True))
    groups, report = world.collect()
    assert report.prompts == (1, 2) and world.now_s == 4.0 and report.surplus_responses == 0
    world.hand_off(1, 1.0)
    world.roll_out([asked[0], *asked[3:]], 2, sampling, 6, DeferRule(2, 1, True), [(5, 0), (6, 1), (6, 2), (6, 3)])
    groups, report = world.collect()
    assert report.prompts == (0, 2) and world.now_s == 10.0 and report.surplus_responses == 0
    assert [spans(c) for group in groups for c in group.completions] == [[(0, 0)], [(0, 0), (1, 4)], [(1, 0)], [(1, 0)]]
    assert [c.token_ids.size for c in groups[0].completions] == [2, 9]
    assert [(c.started_s, c.finished_s) for c in groups[0].completions] == [(0.0, 2.0), (0.0, 10.0)]
    assert world.engines[0].decoded == 2 + 4 + 4 + 4 + 3 + 3 + 5 + 2 + 2 + 3 + 3 + 5 + 5
    world.hand_off(2, 1.0)
    world.roll_out([asked[3], asked[5]], 2, sampling, 7, None, [(6, 1), (6, 3)])
    groups, report = world.collect()
    assert world.now_s == 26.0 and report.surplus_responses == 0
    assert [spans(c) for group in groups for c in group.completions] == [[(1, 0), (2, 5)]] * 2 + [[(1, 0)]] * 2
    assert world.engines[0].decoded == 45 + 30


def spans(completion: Completion) -> list[tuple[int, int]]:
    return [(span.version, span.first_token) for span in completion.versions]


def test_new_tokens_are_drawn_with_new_random_numbers() -> None:
    """A continued request keeps its seed, by which it is known; its engine draws with another one for each length."""
    plain = Request(prompts(1)[0], 0, SAMPLING, 77)
    some, more = (replace(plain, before=cut(plain, range(tokens))) for tokens in (2, 3))
    assert generator_seed(plain) == 77 and len({generator_seed(each) for each in (plain, some, more)}) == 3
    assert read_tokens(more).tolist() == [2, 0, 1, 2]
    with pytest.raises(
        ValueError, match=r"sample 0 of problem p0 is continued after 8 tokens; expected fewer than .* 8"
    ):
        tokens_before(replace(plain, before=cut(plain, range(8))))


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
                                    scheduler.aborted(of, [Unfinished(seed, *NOTHING, (), 0.0) for seed in seeds])
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
