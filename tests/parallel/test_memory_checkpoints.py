"""Two ranks that are killed lose the step under way, and no more: they go on from the checkpoint in shared memory.

Not proven here: that the launcher starts them again (tests/train/test_keeps_running.py), and GPUs.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import ranks

from or1_megatron.runtime.memory_folder import make_memory_folder, memory_keeper, remove_memory_folder

MOMENTS = {"write": 3, "manifest": 3, "after": 5}
"""The newest whole checkpoint after the kill."""


def test_killed_ranks_go_on_from_memory_to_the_bit(tiny_qwen2: Path, tmp_path: Path) -> None:
    """SIGKILL of both ranks in the middle of the write of step 4 to memory, before its manifest, and within step 6. No
    checkpoint is on disk. What follows equals the undisturbed run: metrics, the loop's state, and on each rank
    parameters, moments and generators; each start has another seed."""

    def start(moment: str, name: str, seed: int) -> dict[str, Any]:
        out, rollouts = tmp_path / f"{name}.json", tmp_path / "rollouts.pickle"
        arguments = (str(out), str(tiny_qwen2), str(tmp_path / (moment or name)), str(rollouts), str(seed))
        killed_at = moment if name.startswith("killed") else ""
        log = tmp_path / "logs" / name
        return ranks.job("memory_worker.py", 2, *arguments, killed_at, folder=log)

    def read(name: str) -> Any:
        return ranks.json.loads((tmp_path / f"{name}.json").read_text())

    (done,) = ranks.run_jobs([start("", "whole", 1)])
    assert done["ends"] == [0, 0], done["outputs"]
    whole = read("whole")
    folders = {moment: tmp_path / moment / "checkpoints" for moment in MOMENTS}
    try:
        for folder in folders.values():
            folder.mkdir(parents=True)
            make_memory_folder(folder)
        for done in ranks.run_jobs([start(moment, f"killed {moment}", 1) for moment in MOMENTS]):
            assert done["ends"] == [-signal.SIGKILL] * 2, done["outputs"]
        for moment, folder in folders.items():
            keeper = memory_keeper(folder)
            assert keeper is not None
            assert [path.name for path in keeper.complete()][-1] == f"step_00000{MOMENTS[moment]}"
            assert len(list(keeper.folder.iterdir())) <= 2  # generations, whole or torn
        for done in ranks.run_jobs([start(moment, f"resumed {moment}", 7) for moment in MOMENTS]):
            assert done["ends"] == [0, 0], done["outputs"]
    finally:
        for folder in folders.values():
            remove_memory_folder(folder)
    for moment, step in MOMENTS.items():
        resumed = read(f"resumed {moment}")
        assert resumed["rows"] == {str(later): whole["rows"][str(later)] for later in range(step + 1, 7)}, moment
        assert resumed["digests"] == whole["digests"], moment
        assert resumed["state"] == whole["state"], moment
