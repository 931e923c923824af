"""Plans worked by hand: who sends which rectangle to whom.

Does not prove that loaders ask for what stands here as wanted (test_to_engines does, on real engines).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from or1_megatron.handoff.failures import PlanImpossible
from or1_megatron.handoff.message.shipment import Shipment
from or1_megatron.handoff.message.slices import Slice, plan_buckets, whole_tensor
from or1_megatron.handoff.send_plan import HandoffPlan, make_plan
from or1_megatron.weights.holdings import Holding

NAMES = "wnx"


def flat(name: str, elements: int, dtype: torch.dtype = torch.float32) -> Slice:
    return whole_tensor(name, dtype, (elements,))


def test_the_places_of_slices_in_messages() -> None:
    """Bucket of 64 bytes: a (20 B) at 0, b (6 B) aligned to 32, c (40 B) starts the next, d (100 B) is too large."""
    slices = [flat("a", 5), flat("b", 3, torch.bfloat16), flat("c", 10), flat("d", 25), flat("e", 1)]
    plan = plan_buckets(slices, 64)
    places = [[(slot.slice.name, slot.offset_bytes) for slot in bucket] for bucket in plan]
    assert places == [[("a", 0), ("b", 32)], [("c", 0)], [("d", 0)], [("e", 0)]]
    assert [bucket[-1].end_bytes for bucket in plan] == [38, 40, 100, 4]
    assert plan_buckets([], 64) == []


def want(name: str, box: tuple) -> Slice:
    return Slice(name, box, torch.float32)


def table(plan: HandoffPlan) -> list[tuple[int, int, str, tuple]]:
    """(who packs, for whom, what), in order."""
    return [
        (shipment.source, destination, slot.slice.name, slot.slice.box)
        for shipment in plan.shipments
        for destination in shipment.destinations
        for slot in shipment.slots
    ]


def hops(s: Shipment) -> tuple[tuple[int, int], ...]:
    """(from, to), in the order of the message's way."""
    ranks = (s.source,) if s.via == s.source else (s.source, s.via)
    return tuple((rank, child) for rank in ranks for child in s.children(rank))


def ways(plan: HandoffPlan) -> list[tuple[tuple, tuple]]:
    return [(shipment.destinations, hops(shipment)) for shipment in plan.shipments]


def link_bytes(plan: HandoffPlan) -> Counter[tuple[int, int]]:
    """Bytes of weights by (from, to), including those that are passed on."""
    total = Counter[tuple[int, int]]()
    for shipment in plan.shipments:
        for hop in hops(shipment):
            total[hop] += sum(part.size_bytes for part in shipment.slices)
    return total


def tp2(name: str, ranks=((0,), (1,))) -> list[Holding]:
    """[8, 4] cut along axis 0."""
    return [Holding(name, ((0, 4), (0, 4)), ranks[0]), Holding(name, ((4, 8), (0, 4)), ranks[1])]


def test_tensor_parallel_trainer_to_a_whole_engine() -> None:
    """Both halves, each from its owner, and the norm that both hold from the one that has sent less."""
    held = [*tp2("w"), Holding("n", ((0, 4),), (0, 1))]
    plan = make_plan(held, [[want("w", ((0, 8), (0, 4))), want("n", ((0, 4),))]], 2, 1 << 20)
    assert table(plan) == [
        (0, 2, "w", ((0, 4), (0, 4))),
        (0, 2, "n", ((0, 4),)),
        (1, 2, "w", ((4, 8), (0, 4))),
    ]
    assert link_bytes(plan) == {(0, 2): 64 + 16, (1, 2): 64}


def test_tensor_parallel_trainer_to_tensor_parallel_engine() -> None:
    """Cut alike: each engine rank hears from one trainer rank alone. Cut otherwise: the rectangles' intersections."""
    alike = [[want("w", ((0, 4), (0, 4)))], [want("w", ((4, 8), (0, 4)))]]
    assert table(make_plan(tp2("w"), alike, 2, 1 << 20)) == [
        (0, 2, "w", ((0, 4), (0, 4))),
        (1, 3, "w", ((4, 8), (0, 4))),
    ]
    columns = [[want("w", ((0, 8), (0, 2)))], [want("w", ((0, 8), (2, 4)))]]
    assert table(make_plan(tp2("w"), columns, 2, 1 << 20)) == [
        (0, 2, "w", ((0, 4), (0, 2))),
        (1, 2, "w", ((4, 8), (0, 2))),
        (0, 3, "w", ((0, 4), (2, 4))),
        (1, 3, "w", ((4, 8), (2, 4))),
    ]


def test_padded_vocabulary_of_the_engine_is_not_sent() -> None:
    """13 rows held as 7 + 6; an engine of two ranks, padded to 16, asks for 8 + 5."""
    held = [Holding("w", ((0, 7), (0, 4)), (0,)), Holding("w", ((7, 13), (0, 4)), (1,))]
    wants = [[want("w", ((0, 8), (0, 4)))], [want("w", ((8, 13), (0, 4)))]]
    assert table(make_plan(held, wants, 2, 1 << 20)) == [
        (0, 2, "w", ((0, 7), (0, 4))),
        (1, 2, "w", ((7, 8), (0, 4))),
        (1, 3, "w", ((8, 13), (0, 4))),
    ]


def test_pipeline_stages_send_at_once() -> None:
    """Stage 1's first bucket does not wait for stage 0's second."""
    held = [Holding("w", ((0, 8), (0, 4)), (0,)), Holding("n", ((0, 32),), (0,)), Holding("x", ((0, 32),), (1,))]
    wants = [[want("w", ((0, 8), (0, 4))), want("n", ((0, 32),)), want("x", ((0, 32),))]]
    plan = make_plan(held, wants, 2, 256)
    assert [(s.round, s.source, s.slots[0].slice.name) for s in plan.shipments] == [
        (0, 0, "w"),
        (0, 1, "x"),
        (1, 0, "n"),
    ]


def test_replicas_share_the_sending() -> None:
    """DP2: the second replica's ranks send as much as the first's; a large tensor is divided between them."""
    held = tp2("w", ((0, 2), (1, 3))) + tp2("x", ((0, 2), (1, 3)))
    everything = [want("w", ((0, 8), (0, 4))), want("x", ((0, 8), (0, 4)))]
    plan = make_plan(held, [everything, everything], 4, 1 << 20)
    sent = [sum(b for (source, _), b in link_bytes(plan).items() if source == rank) for rank in range(4)]
    assert sent == [128, 128, 128, 128]
    large = [Holding("w", ((0, 1000), (0, 1000)), (0, 1))]
    plan = make_plan(large, [[want("w", ((0, 1000), (0, 1000)))]], 2, 1 << 30)
    assert table(plan) == [(0, 2, "w", ((0, 500), (0, 1000))), (1, 2, "w", ((500, 1000), (0, 1000)))]


def test_no_bucket_is_larger_than_asked() -> None:
    """A tensor of 128 bytes goes in parts of at most 40: rows of 16 bytes, two at a time. Two senders: 20 each."""
    plan = make_plan([Holding("w", ((0, 8), (0, 4)), (0,))], [[want("w", ((0, 8), (0, 4)))]], 1, 40)
    assert [s.payload_bytes for s in plan.shipments] == [32, 32, 32, 32]
    plan = make_plan(tp2("w"), [[want("w", ((0, 8), (0, 4)))]], 2, 40)
    assert [(s.round, s.source, s.payload_bytes) for s in plan.shipments] == [
        (number // 2, number % 2, 16) for number in range(8)
    ]


def test_a_round_is_divided_among_those_who_send_to_the_group() -> None:
    """A round of 256 bytes. One of two trainer ranks holds all: it may fill the round; in two hops a third."""
    box = ((0, 8), (0, 4))
    held, wants = [Holding("w", box, (0,)), Holding("x", box, (0,))], [[want("w", box), want("x", box)]]
    plan = make_plan(held, wants, 2, 256)
    assert [(s.round, s.payload_bytes) for s in plan.shipments] == [(0, 256)]
    assert plan.bytes_sent() == {0: 256 + 2 * 8}
    plan = make_plan(held, wants, 2, 384, [0])  # rank 0 holds its own and what it passes on
    assert [(s.round, s.payload_bytes) for s in plan.shipments] == [(0, 128), (1, 128)]


def test_engines_that_want_the_same_are_packed_for_once() -> None:
    """Two engines of two ranks: two groups of two."""
    halves = [[want("w", ((0, 4), (0, 4)))], [want("w", ((4, 8), (0, 4)))]]
    plan = make_plan(tp2("w"), halves * 2, 2, 1 << 20)
    assert ways(plan) == [((2, 4), ((0, 2), (0, 4))), ((3, 5), ((1, 3), (1, 5)))]


def test_two_hops_by_hand() -> None:
    """TP2 trainer, an engine beside each rank. Each half comes from its owner, if need be over the neighbour."""
    whole = [want("w", ((0, 8), (0, 4)))]
    plan = make_plan(tp2("w"), [whole] * 2, 2, 1 << 20, [0, 1])
    assert ways(plan) == [
        ((2,), ((0, 2),)),
        ((2,), ((1, 0), (0, 2))),
        ((3,), ((0, 1), (1, 3))),
        ((3,), ((1, 3),)),
    ]
    alike = [[want("w", ((0, 4), (0, 4)))], [want("w", ((4, 8), (0, 4)))]]
    plan = make_plan(tp2("w", ((0, 2), (1, 3))), alike * 2, 4, 1 << 20, [0, 1, 2, 3])
    assert ways(plan) == [((4 + rank,), ((rank, 4 + rank),)) for rank in range(4)]  # nothing leaves a device


def carried_out(plan: HandoffPlan, ranks: int, buffers: int = 2) -> int:
    """Messages that reach all of their group when everybody keeps to the order, and memory is as scarce as can be.

    A trainer rank starts what it packs and what it passes on in one order. It has ``buffers`` for the first, and two
    rounds of the second. An engine rank lets go of messages when it has done with their whole round, and looks one
    round ahead.
    """
    started: set[tuple[int, int]] = set()  # (message, rank): packed, or ready to be received
    have: set[tuple[int, int]] = set()
    mine = {rank: plan.of(rank).shipments for rank in range(ranks)}

    def done_with(rank: int) -> int:
        """The first round of which something is still to come to an engine rank, or to be let go by its children."""
        for s in mine[rank]:
            if (s.number, rank) not in have or held(s, rank):
                return s.round
        return 1 << 30

    def held(s: Shipment, rank: int) -> bool:
        """Whether a child of the rank has not taken the message."""
        return any(
            (s.number, child) not in have if child < plan.trainers else done_with(child) <= s.round
            for child in s.children(rank)
        )

    def may_start(s: Shipment, rank: int) -> bool:
        before = [other for other in mine[rank] if other.number < s.number]
        if rank >= plan.trainers:
            return s.round <= done_with(rank) + 1
        if any((other.number, rank) not in started for other in before):
            return False
        kept = [other for other in before if held(other, rank)]
        if s.source == rank:
            return sum(other.source == rank for other in kept) < buffers
        return all(other.source == rank or other.round >= s.round - 1 for other in kept)

    moved = True
    while moved:
        moved = False
        for rank, shipments in mine.items():
            for s in shipments:
                if (s.number, rank) not in started and may_start(s, rank):
                    started.add((s.number, rank))
                    if s.source == rank:
                        have.add((s.number, rank))
                    moved = True
        for s in plan.shipments:
            for start, stop in hops(s):
                if (s.number, start) in have and (s.number, stop) in started and (s.number, stop) not in have:
                    have.add((s.number, stop))
                    moved = True
    return sum(all((s.number, rank) in have for rank in s.destinations) for s in plan.shipments)


@pytest.mark.parametrize("seed", range(12))
def test_nobody_waits_for_who_waits_for_him(seed: int) -> None:
    """Random cuts, replicas, engines and neighbours; with one buffer as with two."""
    draw = random.Random(seed)
    trainers, engines, tensor = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2)
    held = []
    for name in NAMES:
        middle = draw.randint(1, 7)
        owners = [tuple(sorted(draw.sample(range(trainers), draw.randint(1, trainers)))) for _ in range(2)]
        held += [Holding(name, ((0, middle), (0, 4)), owners[0]), Holding(name, ((middle, 8), (0, 4)), owners[1])]
    shards = [[want(name, ((8 * r // tensor, 8 * (r + 1) // tensor), (0, 4))) for name in NAMES] for r in range(tensor)]
    neighbours = [draw.randrange(trainers) for _ in range(engines * tensor)]
    for near in (None, neighbours):
        plan = make_plan(held, shards * engines, trainers, 64, near)
        for buffers in (1, 2):
            assert carried_out(plan, trainers + engines * tensor, buffers) == len(plan.shipments)


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(PlanImpossible, match=r"'w' at \(\(4, 8\), \(0, 4\)\)"):
        make_plan(tp2("w")[:1], [[want("w", ((0, 8), (0, 4)))]], 1, 1 << 20)
    with pytest.raises(PlanImpossible, match="engines want x"):
        make_plan(tp2("w"), [[want("x", ((0, 8), (0, 4)))]], 2, 1 << 20)
