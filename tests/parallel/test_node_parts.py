"""Checkpoints in the memory of several nodes: each has a part and a copy of another's, and the loss of one costs none.

Nodes are ranks with folders of their own. Not proven here: that launchers bring the parts together
(tests/examples/test_recipe_scripts.py), and nodes with several ranks each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks


@pytest.mark.parametrize("lost", [2, -1])
def test_a_lost_nodes_part_is_on_the_next_one(tiny_qwen2: Path, tmp_path: Path, lost: int) -> None:
    arguments = (str(tiny_qwen2), str(tmp_path / "nodes"), str(lost))
    found = ranks.run_json("node_parts_worker.py", 3, tmp_path / "out.json", *arguments)
    assert found["state"] == {"step": 3}
    assert found["values"] == [3.0]
    assert found["left"] == []
    first, *others = found["folders"]
    assert first.keys() <= {"step_000003", "step_000002.partial"}  # deleted by a thread
    assert {"__0_0.distcp", "__2_0.distcp", "manifest.json", "loop.json"} <= set(first["step_000003"])
    for rank, parts in enumerate(others, start=1):
        expected = [f"__{node}_0.distcp" for node in (rank - 1, rank)]
        assert parts == {"step_000002.partial": expected, "step_000003.partial": expected}
