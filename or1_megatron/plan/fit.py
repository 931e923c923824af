"""Least squares on relative errors, for a few positive constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NUDGE: Final = 0.02
_STEPS: Final = 60
_STUCK: Final = 1e6
"""Damping at which steps are too short to help."""
_FARTHEST: Final = 1.0
"""A step changes the logarithm of a constant by no more than this."""


def fit(
    predict: Callable[[Floats], Sequence[float]], measured: Sequence[float], start: Sequence[float], hold: float = 0.0
) -> tuple[Floats, Floats]:
    """Return the constants that bring ``predict`` nearest to ``measured``, and the relative errors that are left.

    Gauss-Newton in the constants' logarithms, with differences for derivatives, damped until a step helps.

    Args:
        predict: from constants [k] to as many figures as were measured.
        start: [k], each above 0.
        hold: the error that a constant counts for per factor e from its start, so that constants about which the
            figures tell nothing stay there.
    """
    target = np.asarray(measured, float)
    begin = at = np.log(np.asarray(start, float))

    def errors(logs: Floats) -> Floats:
        return np.concatenate([np.asarray(predict(np.exp(logs)), float) / target - 1, hold * (logs - begin)])

    left = errors(at)
    damping = 1e-3
    for _ in range(_STEPS):
        slopes = np.stack([(errors(at + nudge) - left) / _NUDGE for nudge in _NUDGE * np.eye(at.size)], axis=1)
        curvature = slopes.T @ slopes
        weighted = curvature + damping * np.diag(np.maximum(np.diag(curvature), 1e-12))
        step = np.clip(-np.linalg.solve(weighted, slopes.T @ left), -_FARTHEST, _FARTHEST)
        after = errors(at + step)
        if after @ after < left @ left:
            small = np.abs(step).max() < 5e-3
            at, left, damping = at + step, after, damping / 3
            if small:
                break
        elif (damping := damping * 10) > _STUCK:
            break
    return np.exp(at), left[: target.size]
