"""Process groups beside those of Megatron's collectives."""

from __future__ import annotations

import json
from pathlib import Path

import ranks


def test_a_mesh_makes_no_gloo_group_that_nobody_uses(tmp_path: Path) -> None:
    """All ranks, and each replica. Megatron's own would be six more: three for each of the layout's two
    data-parallel groups.

    That its optimizers and our checkpoints do without is what test_checkpoint and test_resume show.
    """
    layout = json.dumps({"ranks": 4, "tensor": 2})
    assert ranks.run_json("mesh_worker.py", 4, tmp_path / "groups.json", layout) == [4, 2, 2]
