"""A flipped bit in a replica's weights, and a rank that the others wait for, are found and named.

Real policies of three ranks in bf16 with a distributed optimizer. Not proven here: flips while an update runs, of which
no sum can know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problem
import pytest
import ranks
import torch
from waiting import wait_until

from or1_megatron.parallel import policy as policy_module
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.replicas import ReplicasDiffer, check_replicas
from or1_megatron.parallel.stragglers import slowest
from or1_megatron.types import UpdateReport

FLIPPED = "embedding.word_embeddings.weight"


def update_with_a_slow_rank(policy: MegatronPolicy, seen: Path) -> UpdateReport:
    """Update. The others begin after rank 1, which goes on when they wait for it."""
    rank, sum_grads = policy.mesh.rank, policy_module.finalize_model_grads

    def arrive(*arguments: Any, **named: Any) -> None:
        (seen / f"arrived {rank}").touch()
        sum_grads(*arguments, **named)

    def hold(*_: Any) -> None:
        (seen / "begun").touch()
        wait_until(lambda: all((seen / f"arrived {other}").exists() for other in (0, 2)), "the other ranks")

    seen.mkdir(exist_ok=True)
    policy_module.finalize_model_grads = arrive
    if rank == 1:
        policy.networks[0].register_forward_pre_hook(hold)
    else:
        wait_until((seen / "begun").exists, "rank 1")
    return problem.update(policy, problem.batch(3, 64))


def flip_and_be_slow(model: Path, seen: Path) -> dict[str, Any]:
    """Flip the lowest and the highest bit of a number in rank 1's copy; then rank 1 is slow in an update."""
    policy = problem.make_policy(model, "bfloat16", ranks=3, micro_batch_tokens=64)
    number = dict(policy.networks[0].named_parameters())[FLIPPED].data.view(torch.int16).view(-1)[7:8]
    check_replicas(policy, 1)
    said = []
    for bit in (1, -(1 << 15)):
        number ^= bit if policy.mesh.rank == 1 else 0
        with pytest.raises(ReplicasDiffer) as raised:
            check_replicas(policy, 2)
        said.append(str(raised.value))
        number ^= bit if policy.mesh.rank == 1 else 0
    check_replicas(policy, 3)
    report = update_with_a_slow_rank(policy, seen)
    waited = 0 < report.waited_s <= report.forward_backward_s
    return {"said": said, "slowest": report.slowest_rank, "waited": waited}


def test_a_flipped_bit_and_a_slow_rank_are_named(tiny_qwen2: Path, tmp_path: Path) -> None:
    """Before the flip and after it is undone, nothing is said."""
    seen = ranks.call(flip_and_be_slow, 3, tiny_qwen2, tmp_path / "seen")
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["slowest"] == 1 and seen[0]["waited"]
    for line in seen[0]["said"]:
        assert "step 2: 1 parameters are not the same" in line
        assert "0.embedding.word_embeddings.weight (rank 1 against 0, 2)" in line


def test_ranks_of_one_place_are_compared() -> None:
    """By hand. Two stages of three replicas: the first stages end later by design, which is no straggler; at the second
    stage rank 5 ends at 9 s, its peers at 4 s and 6 s, whose median is 5 s."""
    first = [("first stage", spent_s) for spent_s in (10.0, 11.0, 12.0)]
    last = [("last stage", spent_s) for spent_s in (4.0, 6.0, 9.0)]
    assert slowest([*first, *last]) == (5, pytest.approx(4.0))
    assert slowest([first[0], last[0]]) is None
