"""Plans worked by hand: who sends which rectangle to whom.

Does not prove that loaders ask for what stands here as wanted (test_shard does, on real engines).
"""

from __future__ import annotations

import pytest
import torch

from or1_megatron.handoff.plan import PlanImpossible, Want, make_plan
from or1_megatron.weights.holdings import Holding

FLOAT = {"w": torch.float32, "n": torch.float32, "x": torch.float32}


def table(plan) -> list[tuple[int, int, str, tuple]]:
    return [
        (shipment.source, shipment.destination, slot.spec.name, slot.spec.box)
        for shipment in plan.shipments
        for slot in shipment.bucket.slots
    ]


def tp2(name: str, ranks=((0,), (1,))) -> list[Holding]:
    """[8, 4] cut along axis 0."""
    return [Holding(name, ((0, 4), (0, 4)), ranks[0]), Holding(name, ((4, 8), (0, 4)), ranks[1])]


def test_tensor_parallel_trainer_to_a_whole_engine() -> None:
    """Both halves, each from its owner, and the norm that both hold from the one that has sent less."""
    held = [*tp2("w"), Holding("n", ((0, 4),), (0, 1))]
    plan = make_plan(held, FLOAT, [[Want("w", ((0, 8), (0, 4))), Want("n", ((0, 4),))]], 2, 1 << 20)
    assert table(plan) == [
        (0, 2, "w", ((0, 4), (0, 4))),
        (0, 2, "n", ((0, 4),)),
        (1, 2, "w", ((4, 8), (0, 4))),
    ]
    assert plan.link_bytes() == {(0, 2): 64 + 16, (1, 2): 64}


def test_tensor_parallel_trainer_to_tensor_parallel_engine() -> None:
    """Cut alike: each engine rank hears from one trainer rank alone. Cut otherwise: the rectangles' intersections."""
    alike = [[Want("w", ((0, 4), (0, 4)))], [Want("w", ((4, 8), (0, 4)))]]
    assert table(make_plan(tp2("w"), FLOAT, alike, 2, 1 << 20)) == [
        (0, 2, "w", ((0, 4), (0, 4))),
        (1, 3, "w", ((4, 8), (0, 4))),
    ]
    columns = [[Want("w", ((0, 8), (0, 2)))], [Want("w", ((0, 8), (2, 4)))]]
    assert table(make_plan(tp2("w"), FLOAT, columns, 2, 1 << 20)) == [
        (0, 2, "w", ((0, 4), (0, 2))),
        (0, 3, "w", ((0, 4), (2, 4))),
        (1, 2, "w", ((4, 8), (0, 2))),
        (1, 3, "w", ((4, 8), (2, 4))),
    ]


def test_padded_vocabulary_of_the_engine_is_not_sent() -> None:
    """13 rows held as 7 + 6; an engine of two ranks, padded to 16, asks for 8 + 5."""
    held = [Holding("w", ((0, 7), (0, 4)), (0,)), Holding("w", ((7, 13), (0, 4)), (1,))]
    wants = [[Want("w", ((0, 8), (0, 4)))], [Want("w", ((8, 13), (0, 4)))]]
    assert table(make_plan(held, FLOAT, wants, 2, 1 << 20)) == [
        (0, 2, "w", ((0, 7), (0, 4))),
        (1, 2, "w", ((7, 8), (0, 4))),
        (1, 3, "w", ((8, 13), (0, 4))),
    ]


def test_pipeline_stages_send_at_once() -> None:
    """Stage 1's first bucket does not wait for stage 0's second."""
    held = [Holding("w", ((0, 8), (0, 4)), (0,)), Holding("n", ((0, 32),), (0,)), Holding("x", ((0, 32),), (1,))]
    wants = [[Want("w", ((0, 8), (0, 4))), Want("n", ((0, 32),)), Want("x", ((0, 32),))]]
    plan = make_plan(held, FLOAT, wants, 2, 128)
    assert [(s.number, s.source, s.bucket.slots[0].spec.name) for s in plan.shipments] == [
        (0, 0, "w"),
        (0, 1, "x"),
        (1, 0, "n"),
    ]


def test_replicas_share_the_sending() -> None:
    """DP2: the second replica's ranks send as much as the first's; a large tensor is divided between them."""
    held = tp2("w", ((0, 2), (1, 3))) + tp2("x", ((0, 2), (1, 3)))
    everything = [Want("w", ((0, 8), (0, 4))), Want("x", ((0, 8), (0, 4)))]
    plan = make_plan(held, FLOAT, [everything, everything], 4, 1 << 20)
    sent = [sum(b for (source, _), b in plan.link_bytes().items() if source == rank) for rank in range(4)]
    assert sent == [128, 128, 128, 128]
    large = [Holding("w", ((0, 1000), (0, 1000)), (0, 1))]
    plan = make_plan(large, FLOAT, [[Want("w", ((0, 1000), (0, 1000)))]], 2, 1 << 30)
    assert table(plan) == [(0, 2, "w", ((0, 500), (0, 1000))), (1, 2, "w", ((500, 1000), (0, 1000)))]


def test_no_bucket_is_larger_than_asked() -> None:
    """A tensor of 128 bytes goes in parts of at most 40: rows of 16 bytes, two at a time."""
    plan = make_plan([Holding("w", ((0, 8), (0, 4)), (0,))], FLOAT, [[Want("w", ((0, 8), (0, 4)))]], 1, 40)
    assert [s.bucket.size_bytes for s in plan.shipments] == [32, 32, 32, 32]


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(PlanImpossible, match=r"'w' at \(\(4, 8\), \(0, 4\)\)"):
        make_plan(tp2("w")[:1], FLOAT, [[Want("w", ((0, 8), (0, 4)))]], 1, 1 << 20)
    with pytest.raises(PlanImpossible, match="engines want x"):
        make_plan(tp2("w"), FLOAT, [[Want("x", ((0, 8), (0, 4)))]], 2, 1 << 20)
