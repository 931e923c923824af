"""A flipped bit in a replica's weights is found and named.

Real policies of three ranks in bf16 with a distributed optimizer. Not proven here: flips while an update runs, of which
no sum can know.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import problem
import pytest
import ranks
import torch

from or1_megatron.parallel.replicas import ReplicasDiffer, check_replicas

FLIPPED = "embedding.word_embeddings.weight"


def flip_bits(model: Path, ranks: int, expert: int) -> list[str]:
    """Flip the lowest and the highest bit of a number in rank 1's copy."""
    policy = problem.make_policy(model, "bfloat16", ranks=ranks, expert=expert, micro_batch_tokens=64)
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
    return said


@pytest.mark.parametrize(
    ("family", "expert", "others"), [("qwen2", 1, "0, 2"), ("qwen3_moe", 2, "0")], ids=["dense", "experts spread"]
)
def test_a_flipped_bit_is_named(family: str, expert: int, others: str, tiny: Callable[..., Path]) -> None:
    """Before the flip and after it is undone, nothing is said, of experts that differ by rank either."""
    count = 4 - expert
    said = ranks.call(flip_bits, count, tiny(family), count, expert)
    assert said == [said[0]] * count and len(said[0]) == 2
    for line in said[0]:
        assert "step 2: 1 parameters are not the same" in line
        assert f"0.embedding.word_embeddings.weight (rank 1 against {others})" in line
