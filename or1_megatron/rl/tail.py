"""Tail batching: a step gives up its slowest prompts, and a later step of such prompts asks them again.

``rollout.tail: defer``. A step samples more prompts than it trains on, and is made when D_R groups are sampled. The
other prompts are *deferred*: given up whole, and asked again whole, with the same seeds. Once D_R prompts are deferred,
a step takes those that were drawn first and waits for all of them. A stage's last steps take what is left. So every
step trains D_R groups, and a stage trains the prompts that it would train without deferring, each exactly once.

``rollout.continued: train`` or ``mask``. What was sampled of a deferred prompt's responses is kept, and the next step
takes the prompt in any case: it goes on with its unfinished responses, and fills up with the first new groups.

Which prompts are deferred depends on the engines' speed. It is recorded, and a resumed run repeats the record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from or1_megatron.config.schema import StageConfig
from or1_megatron.interfaces import ProblemStream
from or1_megatron.runtime.tail_record import TailRecord
from or1_megatron.types import DeferRule, Place, Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt that was drawn and is not trained yet."""

    prompt: Prompt
    place: Place
    step: int
    """That drew it, from 1."""


@dataclass(frozen=True, slots=True)
class TailReport:
    """What a step has done about its tail."""

    deferred: int
    """Prompts that it gave up."""
    waiting: int
    """Prompts that wait after it."""
    waited: int
    """Steps since the oldest of its prompts was drawn."""


def compose(waiting: int, wanted: int, extra: int, steps_left: int, continued: bool = False) -> tuple[int, int]:
    """Return how many deferred and how many new prompts a step asks.

    It takes ``wanted`` (D_R) of them; what it asks beyond is deferred. ``steps_left`` of the stage, this one included,
    are enough for all that wait: waiting <= wanted * steps_left, before and after the step. ``continued``: the deferred
    ones are taken at once, so that no more than ``extra`` ever wait.
    """
    if continued:
        old = min(waiting, wanted)
        return old, wanted - old + (0 if steps_left == 1 else extra)
    if waiting >= wanted or steps_left == 1:
        old = min(waiting, wanted)
        return old, wanted - old
    return 0, wanted + min(extra, wanted * (steps_left - 1) - waiting)


def longest_wait(wanted: int, extra: int, continued: bool = False) -> int:
    """Return the most steps between the one that draws a prompt and the one that trains it; ``continued``: 1.

    At most wanted - 1 + extra prompts wait. Should the first step of deferred prompts leave some of them, further
    prompts make up a whole step's, ``extra`` at a time.
    """
    if continued and extra:
        return 1
    return 2 + math.ceil((wanted - 1) / extra) if extra else 0


class Tail:
    """The deferred prompts, and the current step's."""

    def __init__(self, share: float, record: TailRecord | None, continued: bool = False) -> None:
        """
        Args:
            share: prompts that a step asks beyond D_R, as a share of D_R.
            record: None: nothing is recorded.
            continued: the responses of deferred prompts are continued, in the next step.
        """
        self._share, self._record, self._continued = share, record, continued
        self._known: dict[int, Mapping[str, Any]] | None = None
        self.waiting: list[Drawn] = []
        """The deferred prompts, in the order in which they were drawn."""
        self._taken: list[Prompt] = []
        # From the stream, D_R at a time as without deferring, since it mixes repeats by such batches; not yet asked.
        self._step, self._old = 0, 0
        self._drawn: list[Drawn] = []  # by the current step
        self._asked: list[int] = []  # indices of those that are asked: all, or those that it is known to take

    def draw(self, stream: ProblemStream, stage: StageConfig, seed: int, step: int, steps_left: int) -> list[Drawn]:
        """Return what step ``step`` (from 1) asks; ``seed`` is that of the prompts that it draws."""
        wanted = stage.prompts_per_step
        extra = min(math.ceil(self._share * wanted - 1e-9), max(0, stream.left - wanted))
        self._old, new = compose(len(self.waiting), wanted, extra, steps_left, self._continued)
        while len(self._taken) < new:
            self._taken += stream.take(wanted)
        fresh = [Drawn(prompt, (seed, place), step) for place, prompt in enumerate(self._taken[:new])]
        self._taken = self._taken[new:]
        self._step, self._drawn = step, self.waiting[: self._old] + fresh
        self._asked = self._repeated(wanted) or list(range(len(self._drawn)))
        return [self._drawn[index] for index in self._asked]

    def rule(self, wanted: int) -> DeferRule:
        """Return how the step that was drawn last takes ``wanted`` of its prompts."""
        return DeferRule(wanted, self._old, keep=True) if self._continued else DeferRule(wanted)

    def settle(self, taken: Sequence[int]) -> TailReport:
        """Defer what the step did not take; ``taken`` are indices into what ``draw`` returned."""
        trained = [self._asked[index] for index in taken]
        left = [drawn for index, drawn in enumerate(self._drawn) if index not in set(trained)]
        self.waiting = self.waiting[self._old :] + left
        if self._record is not None:
            self._record.write(self._step, self._names(), trained)
        oldest = min(self._drawn[index].step for index in trained)
        return TailReport(len(left), len(self.waiting), self._step - oldest)

    def state(self) -> dict[str, Any]:
        """JSON-able: [problem id, seed, place, step] of each deferred prompt, and the ids of those not yet asked."""
        return {
            "deferred": [[drawn.prompt.problem.id, *drawn.place, drawn.step] for drawn in self.waiting],
            "not_asked": [prompt.problem.id for prompt in self._taken],
        }

    def restore(self, state: Mapping[str, Any], stream: ProblemStream) -> None:
        """Take over what ``state`` returned, or an older version's, which lacks a part."""
        found = state.get("deferred", [])
        self.waiting = [Drawn(stream.find(name), (seed, place), step) for name, seed, place, step in found]
        self._taken = [stream.find(name) for name in state.get("not_asked", [])]

    def clear(self) -> None:
        """Forget the prompts that are deferred or not yet asked."""
        self.waiting.clear()
        self._taken.clear()

    def _names(self) -> list[Any]:
        return [[drawn.prompt.problem.id, *drawn.place] for drawn in self._drawn]

    def _repeated(self, wanted: int) -> list[int]:
        """Return what the step took when it was made before this run was resumed; nothing if it was not."""
        if self._record is None:
            return []
        if self._known is None:
            self._known = self._record.read()
        row = self._known.get(self._step)
        if row is not None and (row["asked"] != self._names() or len(row["trained"]) != wanted):
            logger.warning("step %d asks or trains other prompts than its record: it is not repeated", self._step)
            self._known = {}
            return []
        return [] if row is None else [int(index) for index in row["trained"]]
