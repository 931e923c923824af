"""Least squares on relative errors, for a few positive constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NUDGE: Final = 0.02
_STEPS: Final = 8
_FARTHEST: Final = 1.0
"""A step changes the logarithm of a constant by no more than this."""


def fit(
    predict: Callable[[Floats], Sequence[float]], measured: Sequence[float], start: Sequence[float]
) -> tuple[Floats, Floats]:
    """Return the constants that bring ``predict`` nearest to ``measured``, and the relative errors that are left.

    Gauss-Newton in the constants' logarithms, with differences for derivatives, damped until a step helps.

    Args:
        predict: from constants [k] to as many figures as were measured.
        start: [k], each above 0.
    """
    target = np.asarray(measured, float)
    at = np.log(np.asarray(start, float))

    def errors(logs: Floats) -> Floats:
        return np.asarray(predict(np.exp(logs)), float) / target - 1

    left = errors(at)
    damping = 1e-3
    for _ in range(_STEPS):
        slopes = np.stack([(errors(at + nudge) - left) / _NUDGE for nudge in _NUDGE * np.eye(at.size)], axis=1)
        curvature = slopes.T @ slopes
        weighted = curvature + damping * np.diag(np.maximum(np.diag(curvature), 1e-12))
        step = np.clip(-np.linalg.solve(weighted, slopes.T @ left), -_FARTHEST, _FARTHEST)
        found = errors(at + step)
        if found @ found < left @ left:
            small = np.abs(step).max() < 5e-3
            at, left, damping = at + step, found, damping / 3
            if small:
                break
        else:
            damping *= 10
    return np.exp(at), left
