"""A save that is killed at any moment leaves a checkpoint that loads, and it is the newest that was ever complete.

Not proven here: that a disk keeps what was synced when the power fails, and kills of one rank of several.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks

KILLS = 80
PHASES = {"prepare", "snapshot", "write", "manifest", "rename", "replace", "best", "delete", "at a random time"}


@pytest.mark.slow
def test_killed_at_any_moment(tiny_qwen2: Path, tmp_path: Path) -> None:
    """SIGKILL in each phase of a save, and of dropping older ones: what is loaded next is no older than the newest that
    had been complete, and equals, to the bit, what the uninterrupted run had at that step: parameters, moments,
    generators."""
    found = ranks.run_json("killed_saves.py", 1, tmp_path / "out.json", str(tiny_qwen2), str(KILLS), "11")
    assert found["wrong"] == []
    assert sum(found["phases"].values()) == KILLS >= 50
    assert set(found["phases"]) == PHASES
