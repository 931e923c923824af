"""Saves the loop's state as checkpoints, when ``Loop.save`` asks, and keeps the state that a stop saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from or1_megatron.interfaces import Policy, Rollouts

if TYPE_CHECKING:
    from or1_megatron.checkpoint.keeper import CheckpointKeeper


class Saving:
    """Saves ``snapshot`` as a checkpoint, one save at a time, and tells the keeper when a checkpoint is complete."""

    def __init__(self, policy: Policy, keeper: CheckpointKeeper, rollouts: Rollouts) -> None:
        """``rollouts``: their finished responses become part of each checkpoint."""
        self._policy, self._keeper, self._rollouts = policy, keeper, rollouts
        self.snapshot: Mapping[str, Any] = {}
        """The loop's state after its last complete step."""
        self.saved_at: int | None = None
        """The step of the newest checkpoint, complete or still being written."""
        self._writing: tuple[int, bool] | None = None  # (step, best)
        self._write_s: float | None = None  # writing time of the last checkpoint, until it is reported

    def write(self, step: int, best: bool) -> None:
        """Save the snapshot of ``step``. If it is saved already, only tell the keeper, and only of a ``best`` step."""
        if self.saved_at != step:
            self.finish(wait=True)
            self._policy.save(self._keeper.folder_for(step), self.snapshot, self._rollouts.finished_responses())
            self.saved_at = step
            self._writing = (step, best)
        elif best:
            self._keeper.saved(step, best)

    def finish(self, wait: bool) -> None:
        """If the save under way is complete, tell the keeper. With ``wait``, wait until the save is complete."""
        if self._writing is None:
            return
        if (write_s := self._policy.finish_save(wait)) is not None:
            self._write_s = write_s
            self._keeper.saved(*self._writing)
            self._writing = None

    def take_write_s(self) -> dict[str, float]:
        """Return the metric ``checkpoint/write_s`` if a checkpoint was completed since the last call; else {}."""
        write_s, self._write_s = self._write_s, None
        return {} if write_s is None else {"checkpoint/write_s": write_s}
