"""A flipped bit in one data-parallel replica's weights is found, and named, by the comparison of all replicas.

Real policies of three ranks in bf16. Not proven here: what happens to master weights and optimizer state that a
distributed optimizer holds once; no copy exists to compare them with.
"""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_json


def test_a_flipped_bit_of_one_replica_is_named(tiny_qwen2: Path, tmp_path: Path) -> None:
    """The lowest and the highest bit. Before the flip and after it is undone, nothing is said."""
    said = run_json("replicas_worker.py", 3, tmp_path / "out.json", str(tiny_qwen2), json.dumps({"ranks": 3}))
    assert said[0] == said[1] == said[2]
    for line in said[0]:
        assert "step 2: 1 parameters are not the same" in line
        assert "0.embedding.word_embeddings.weight (rank 1 against 0, 2)" in line
