"""A roll-out's requests as the plan sees them: numbers, dealt to engines by the scheduler that deals a run's.

Requests are numbered from 0, group by group: request r is sample r % M of prompt r // M.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from or1_megatron.rollout.scheduler import Abort, Action, Scheduler, Submit
from or1_megatron.types import Completion, Problem, Prompt, RefillRule, Sampling, Verdict

_SAMPLING: Final = Sampling(1.0, 1.0, 1)
_VERDICT: Final = Verdict(1.0, "right", "", "", 0.0)


class Requests:
    """Which engine has which request when. Each method adds to what ``deal`` returns next."""

    def __init__(
        self, prompts: int, group_size: int, engines: int, max_concurrent: int, kept: Sequence[bool] | None, wanted: int
    ) -> None:
        """
        Args:
            prompts: that may be sampled.
            kept: with refill, whether each prompt's group is kept; None without.
            wanted: with refill, the groups to keep.
        """
        rule = None
        if kept is not None:
            rule = RefillRule(wanted, lambda group: kept[int(group.prompt.problem.id)], 1 - sum(kept) / len(kept))
        self._scheduler = Scheduler(engines, max_concurrent)
        named = [Prompt(Problem(str(n), "", "", (), "", {}, ""), np.zeros(0, np.int32)) for n in range(prompts)]
        self._ticket, self._actions = self._scheduler.begin(named, group_size, _SAMPLING, 0, rule)
        self._roll_out = self._scheduler.at(self._ticket)
        self._keys = list(self._roll_out.requests)
        self._seeds = [request.seed for request in self._roll_out.requests.values()]
        self._number = {seed: number for number, seed in enumerate(self._seeds)}

    def deal(self) -> list[tuple[int, list[int], bool]]:
        """Return what engines are told now: (engine, requests, True if they are given up and False if they are new).

        The engine has no request any more that it is told to give up.
        """
        told = []
        actions, self._actions = self._actions, []
        while actions:
            following: list[Action] = []
            for action in actions:
                if isinstance(action, Submit):
                    seeds = [request.seed for request in action.requests]
                    told.append((action.engine, self._numbers(seeds), False))
                elif isinstance(action, Abort):
                    told.append((action.engine, self._numbers(action.seeds), True))
                    following += self._scheduler.aborted(action.engine, action.seeds)
            actions = following
        return told

    def decoded(self, engine: int, request: int) -> None:
        """Take in that ``engine`` has finished a request."""
        nothing = np.zeros(0, np.int32)
        prompt, sample = self._keys[request]
        seed = self._seeds[request]
        made = Completion(
            str(prompt), sample, nothing, nothing.astype(np.float32), "", "stop", (), engine, seed, 0.0, 0.0
        )
        self._actions += self._scheduler.finished(engine, [made])

    def judged(self, request: int) -> bool:
        """Take in a verdict; return whether the roll-out's result is complete."""
        self._actions += self._scheduler.judged(self._ticket, self._keys[request], _VERDICT)
        return self._roll_out.judged

    @property
    def result_prompts(self) -> int:
        """Prompts, counted from the first, that make up the result."""
        return len(self._roll_out.budget.result)

    def _numbers(self, seeds: Iterable[int]) -> list[int]:
        return [self._number[seed] for seed in seeds]
