"""Restarts the ranks of a run from its newest checkpoint after a rank, or a process that the ranks need, has died.

A run is not restarted if it has finished, was asked to stop, or was ended by a UserError (bad input, a full disk). A
run ends for good when ``max_restarts`` restarts in a row made no new step, or when the ranks raise the same error at
the same step again.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Final

from or1_megatron.errors import STOPPED, USER_ERROR
from or1_megatron.runtime.faults import Fault, FaultRecord
from or1_megatron.runtime.launch import Ended
from or1_megatron.runtime.run_folder import RunFolder, step_of
from or1_megatron.runtime.signals import signals_handled_by

PAUSES_S: Final = (0.0, 5.0, 25.0)
"""Pauses before the first, second and third restart in a row. The third pause also comes before later restarts."""
_RECENT_S: Final = 60.0
"""A stall or failure recorded at most this many seconds before the ranks ended is named as the reason."""
_RAISED: Final = 1
"""Exit code of a rank that raised an exception other than a UserError."""


class Restarts:
    """Launches the ranks, and launches them again after each failure that a restart may repair."""

    def __init__(
        self,
        folder: RunFolder,
        max_restarts: int,
        newest: Callable[[], Path | None],
        pauses_s: Sequence[float] = PAUSES_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            newest: returns the checkpoint from which the run continues (``CheckpointKeeper.newest``).
            say: prints a line for people; by default to standard error.
        """
        self._folder, self._max, self._newest, self._pauses_s = folder, max_restarts, newest, pauses_s
        self._faults = FaultRecord(folder.root)
        self._say = say or (lambda line: print(f"or1: {line}", file=sys.stderr, flush=True))

    def run(self, launch: Callable[[], Ended]) -> int:
        """Call ``launch`` until no restart is due, and return the exit code for the shell.

        A signal during a pause raises SystemExit. Main thread only.
        """
        with exit_on_signals():
            return self._attempts(launch)

    def _attempts(self, launch: Callable[[], Ended]) -> int:
        furthest, in_a_row = self._last_step(), 0
        before: tuple[int, str] | None = None
        while True:
            started_s = time.time()
            ended = launch()
            if ended.stop_requested or ended.rank_code in (0, USER_ERROR, STOPPED):
                return ended.code
            step = self._last_step()
            if step > furthest:
                furthest, in_a_row = step, 0
            why = self._why(ended, started_s)
            failure = step, _without_numbers(why)
            repeated = ended.rank_code == _RAISED and failure == before
            if repeated or in_a_row >= self._max:
                self._say(self._last_words(step, why, repeated, in_a_row))
                return ended.code
            before = failure
            pause_s = self._pauses_s[min(in_a_row, len(self._pauses_s) - 1)]
            in_a_row += 1
            self._faults.write(Fault("restart", "the ranks", why))
            when = f"in {pause_s:g} s" if pause_s else "at once"
            self._say(
                f"{why}. The ranks start again {when}; saved: {self._saved()}; restart {in_a_row} "
                f"without a new step, of at most {self._max} (run.max_restarts)"
            )
            time.sleep(pause_s)

    def _why(self, ended: Ended, since_s: float) -> str:
        """Return how the ranks ended, and the reason if a rank or the watchdog has recorded one."""
        faults = list(self._faults.read(max(since_s, time.time() - _RECENT_S)))
        stalled = [fault for fault in faults if fault.kind == "stalled"][-1:]
        failed = [fault for fault in faults if fault.kind == "failed"][:1]
        said = [fault.why for fault in (stalled or failed)]
        return "; ".join([ended.how.partition(" at ")[0] if said else ended.how, *said])

    def _last_words(self, step: int, why: str, repeated: bool, in_a_row: int) -> str:
        if repeated:
            reason = f"the same error came again after step {step}"
        elif self._max == 0:
            reason = "run.max_restarts is 0"
        else:
            reason = f"{in_a_row} restarts in a row brought no new step (run.max_restarts)"
        return (
            f"training stopped for good, since {reason}: {why}. Saved: {self._saved()}. Look at the messages "
            f"above and {self._folder.logs}, then run the same command again to continue from there"
        )

    def _saved(self) -> str:
        newest = self._newest()
        return "nothing" if newest is None else f"the checkpoint of step {step_of(newest)} in {newest.parent}"

    def _last_step(self) -> int:
        """Return the last step with a record of metrics or rollouts; -1 if there is none."""
        return max(self._folder.recorded_steps(), default=-1)


def exit_on_signals() -> AbstractContextManager[None]:
    """Let stop signals raise SystemExit within the block, except while ``launch`` handles them. Main thread only."""
    return signals_handled_by(_leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _without_numbers(text: str) -> str:
    """Return the text without pids, addresses and times, which differ each time."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)
