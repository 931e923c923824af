"""Measures the wall time of a step, and the part of each verb (method of the loop) in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class StepTimer:
    """Adds up the seconds per verb between laps. A lap is the time from one call of ``lap`` to the next.

    >>> timer = StepTimer()
    >>> with timer("verify"): ...
    >>> wall_s, seconds = timer.lap()      # seconds["verify"] <= wall_s

    Laps follow each other without a gap, so no second of a run is lost. If ``lap`` is called inside a verb, the verb's
    time so far counts to the ended lap, and the rest to the next lap.
    Verbs must not nest, because the inner verb's time would count twice; a nested verb raises RuntimeError.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock``: returns monotonic seconds."""
        self._clock = clock
        self._lap_started_s = clock()
        self._verb: str | None = None
        self._verb_started_s = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, verb: str) -> Iterator[None]:
        """Add the block's time to the verb ``verb``, also if the block raises."""
        if self._verb is not None:
            raise RuntimeError(f"timer: verb '{verb}' started inside verb '{self._verb}'; verbs must not nest")
        self._verb, self._verb_started_s = verb, self._clock()
        try:
            yield
        finally:
            self._credit(self._clock())
            self._verb = None

    def lap(self) -> tuple[float, Mapping[str, float]]:
        """Return (wall seconds, seconds in each verb of the loop) since the last lap, and start the next lap."""
        now_s = self._clock()
        if self._verb is not None:
            self._credit(now_s)
        wall_s, seconds = now_s - self._lap_started_s, self._seconds
        self._lap_started_s, self._seconds = now_s, {}
        return wall_s, seconds

    def _credit(self, now_s: float) -> None:
        assert self._verb is not None
        self._seconds[self._verb] = self._seconds.get(self._verb, 0.0) + now_s - self._verb_started_s
        self._verb_started_s = now_s
