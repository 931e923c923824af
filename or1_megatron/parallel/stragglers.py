"""Finds the rank that the other data-parallel ranks wait for before gradients are summed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import median


def slowest(computed: Sequence[tuple[Hashable, float]]) -> tuple[int, float] | None:
    """Return the rank that its peers waited for longest, and how long the median of these waited, in seconds.

    Ranks of one model-parallel place compute the same part of the model and are compared. The ranks of one replica wait
    for each other all the time, so that the one found stands for its replica.

    Args:
        computed: by rank, its place (tensor, pipeline and expert rank) and the seconds from the start of its update
            until its gradients were ready to be summed.

    Returns:
        None: no two ranks have the same place.
    """
    waits = []
    for place in dict.fromkeys(place for place, _ in computed):
        times = sorted((spent_s, rank) for rank, (other, spent_s) in enumerate(computed) if other == place)
        if len(times) > 1:
            last_s, rank = times.pop()
            waits.append((last_s - median(spent_s for spent_s, _ in times), rank))
    if not waits:
        return None
    waited_s, rank = max(waits)
    return rank, waited_s
