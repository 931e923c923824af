"""When a run is started again, when it is not, and what its last words are.

The ranks are a function that ends as ranks do and writes rows of metrics and failures. Not proven here: that a real run
goes on (tests/train/test_keeps_running.py), and that nothing of an attempt is left (test_launch.py).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.errors import PART_LOST, STOPPED, USER_ERROR
from or1_megatron.runtime.faults import COUNTED, Fault, FaultRecord
from or1_megatron.runtime.launch import Ended
from or1_megatron.runtime.restarts import Restarts
from or1_megatron.runtime.run_folder import RunFolder, step_name
from or1_megatron.schemas.metrics import FAULTS

KILLED = Ended(128 + signal.SIGKILL, False, -signal.SIGKILL, "rank 1 (pid 7) was killed by SIGKILL at 12:00:00")
LOST = Ended(PART_LOST, False, PART_LOST, "rank 0 (pid 8) exited with code 4 at 12:00:00; its message is above")
RAISED = Ended(1, False, 1, "rank 0 (pid 9) exited with code 1 at 12:00:00; its message is above")
DONE = Ended(0, False)

Attempt = tuple[Ended, int, str]
"""(how it ends, its last finished step, what rank 0 says of its failure)."""


def keep_running(root: Path, attempts: Sequence[Attempt], max_restarts: int = 3) -> tuple[int, int, list[str]]:
    """Run the attempts one after another; (exit code, attempts made, what was said)."""
    folder, said = RunFolder(root), []
    folder.create()
    made = iter(attempts)
    count = 0

    def launch() -> Ended:
        nonlocal count
        count += 1
        ended, step, why = next(made)
        folder.metrics.write_text("".join(json.dumps({"step": done}) + "\n" for done in range(step + 1)))
        if why:
            FaultRecord(root).write(Fault("failed", "rank 0", why))
        return ended

    newest = CheckpointKeeper(folder.checkpoints, keep_last=1, keep_best=False).newest
    code = Restarts(folder, max_restarts, newest, [0.0], said.append).run(launch)
    return code, count, said


@pytest.mark.parametrize(
    "ended",
    [
        DONE,
        Ended(USER_ERROR, False, USER_ERROR, "rank 0"),
        Ended(STOPPED, False, STOPPED, "rank 0"),
        Ended(130, True, STOPPED),
        Ended(137, True, -9),
    ],
    ids=["finished", "user's error", "asked to stop", "Ctrl-C", "Ctrl-C, and a rank was killed"],
)
def test_what_is_not_started_again(tmp_path: Path, ended: Ended) -> None:
    code, count, said = keep_running(tmp_path, [(ended, 3, "")])
    assert (code, count, said) == (ended.code, 1, [])


def test_starts_again_and_records_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / step_name(2)
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    code, count, said = keep_running(tmp_path, [(KILLED, 3, ""), (LOST, 4, "RolloutError: gone"), (DONE, 6, "")])
    assert (code, count) == (0, 3)
    assert "rank 1 (pid 7) was killed by SIGKILL" in said[0] and "the checkpoint of step 2" in said[0]
    assert "RolloutError: gone" in said[1]
    assert FaultRecord(tmp_path).counts()["faults/restarts"] == 2


def test_ends_for_good_without_a_new_step(tmp_path: Path) -> None:
    """Steps that are made again after a resume are not new, so a fault at the same place cannot repeat for ever."""
    attempts = [(KILLED, 5, ""), (KILLED, 4, ""), (KILLED, 5, ""), (KILLED, 5, "")]
    code, count, said = keep_running(tmp_path, attempts)
    assert (code, count) == (128 + signal.SIGKILL, 4)
    assert "3 restarts in a row brought no new step" in said[-1] and "Saved: nothing." in said[-1]


def test_a_new_step_begins_the_count_anew(tmp_path: Path) -> None:
    code, count, _ = keep_running(tmp_path, [(KILLED, step, "") for step in range(8)] + [(DONE, 9, "")], max_restarts=1)
    assert (code, count) == (0, 9)


def test_the_same_error_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    """Numbers in it may differ, such as addresses. Another error, or another step, is not the same."""
    same = [(RAISED, 5, "ValueError: bad tensor at 0x7f01"), (RAISED, 5, "ValueError: bad tensor at 0x7f02")]
    code, count, said = keep_running(tmp_path / "same", same)
    assert (code, count) == (1, 2)
    assert "the same error came again after step 5" in said[-1] and "ValueError: bad tensor" in said[-1]
    other = [
        (RAISED, 5, "ValueError: this"),
        (RAISED, 5, "KeyError: that"),
        (RAISED, 6, "KeyError: that"),
        (DONE, 9, ""),
    ]
    assert keep_running(tmp_path / "other", other)[:2] == (0, 4)


def test_every_counted_fault_is_a_metric_with_a_meaning() -> None:
    assert set(COUNTED.values()) == {f"faults/{name}" for name in FAULTS}


def test_zero_restarts(tmp_path: Path) -> None:
    code, count, said = keep_running(tmp_path, [(KILLED, 5, "")], max_restarts=0)
    assert (code, count) == (128 + signal.SIGKILL, 1)
    assert "run.max_restarts is 0" in said[-1]


def test_a_signal_between_two_attempts_ends_the_run(tmp_path: Path) -> None:
    """The signal comes when the pause is announced. Without a handler it would end this process at once."""
    folder = RunFolder(tmp_path)
    folder.create()
    handler = signal.getsignal(signal.SIGTERM)

    def say(line: str) -> None:
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        Restarts(folder, 3, lambda: None, [3600.0], say).run(lambda: KILLED)
    assert signal.getsignal(signal.SIGTERM) is handler
