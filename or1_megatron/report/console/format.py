"""Formats numbers, percentages, counts and durations with few digits; ``-`` stands for a value that is missing."""

from __future__ import annotations

import math

_MISSING = "-"


def number(value: float | None) -> str:
    """Return a number as text: three significant digits (0.412, 88.1), no decimals from 100 on (1240). Numbers below
    0.0001 have an exponent (5e-05)."""
    if value is None or not math.isfinite(value):
        return _MISSING if value is None else str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    if size < 1e-4:
        return f"{value:.0e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def fraction(value: float | None) -> str:
    """Return a fraction as a percentage with one decimal."""
    return _MISSING if value is None else f"{100 * value:.1f}%"


def quantity(value: float | None) -> str:
    """Return a count as text. A large count is given in thousands, millions or billions: 512, 5.1k, 64.2M."""
    if value is None:
        return _MISSING
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{suffix}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Return a duration such as 4.21s, 38.2s, 12m05s or 3h07m."""
    if seconds is None:
        return _MISSING
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
