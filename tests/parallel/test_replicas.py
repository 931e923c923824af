"""A flipped bit in a replica's weights, and a rank that the others wait for, are found and named.

Real policies of three ranks in bf16 with a distributed optimizer. Not proven here: flips while an update runs, of which
no sum can know.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_json

from or1_megatron.parallel.stragglers import slowest


def test_a_flipped_bit_and_a_slow_rank_are_named(tiny_qwen2: Path, tmp_path: Path) -> None:
    """The lowest and the highest bit. Before the flip and after it is undone, nothing is said."""
    parallel = json.dumps({"ranks": 3, "micro_batch_tokens": 64})
    told = run_json("replicas_worker.py", 3, tmp_path / "out.json", str(tiny_qwen2), parallel)
    assert told[0] == told[1] == told[2]
    assert told[0]["slowest"] == 1 and told[0]["waited"]
    for line in told[0]["said"]:
        assert "step 2: 1 parameters are not the same" in line
        assert "0.embedding.word_embeddings.weight (rank 1 against 0, 2)" in line


def test_ranks_of_one_place_are_compared() -> None:
    """By hand. Two stages of three replicas: the first stages end later by design, which is no straggler; at the second
    stage rank 5 ends at 9 s, its peers at 4 s and 6 s, whose median is 5 s."""
    first = [("first stage", spent_s) for spent_s in (10.0, 11.0, 12.0)]
    last = [("last stage", spent_s) for spent_s in (4.0, 6.0, 9.0)]
    assert slowest([*first, *last]) == (5, pytest.approx(4.0))
    assert slowest([first[0], last[0]]) is None
