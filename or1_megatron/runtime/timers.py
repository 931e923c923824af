"""Where a step's wall time goes: one stopwatch per verb, never two at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class StepTimer:
    """Accumulates seconds per verb between laps.

    >>> timer = StepTimer()
    >>> with timer("verify"): ...
    >>> wall_s, seconds = timer.lap()      # seconds["verify"] <= wall_s

    Laps follow each other without a gap, so that over a run no second is lost: a verb that is running when the lap
    ends (the report, which asks for it) gives its first part to this lap and the rest to the next.
    Verbs exclude each other; opening one inside another would count the time twice and raises RuntimeError.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._lap_started_s = clock()
        self._verb: str | None = None
        self._verb_started_s = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, verb: str) -> Iterator[None]:
        """Time the block as ``verb``, also when it raises."""
        if self._verb is not None:
            raise RuntimeError(f"timer: verb '{verb}' started inside verb '{self._verb}'; verbs must not nest")
        self._verb, self._verb_started_s = verb, self._clock()
        try:
            yield
        finally:
            self._credit(self._clock())
            self._verb = None

    def lap(self) -> tuple[float, Mapping[str, float]]:
        """(wall seconds, seconds per verb) since the last lap or since construction; starts the next lap."""
        now_s = self._clock()
        if self._verb is not None:
            self._credit(now_s)
        wall_s, seconds = now_s - self._lap_started_s, self._seconds
        self._lap_started_s, self._seconds = now_s, {}
        return wall_s, seconds

    def _credit(self, now_s: float) -> None:
        """Give the running verb its time up to now."""
        assert self._verb is not None
        self._seconds[self._verb] = self._seconds.get(self._verb, 0.0) + now_s - self._verb_started_s
        self._verb_started_s = now_s
