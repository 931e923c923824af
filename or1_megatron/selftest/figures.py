"""A measured value with its unit and the limit that it should keep, and how people read it."""

from __future__ import annotations

from typing import Any


def figure(
    value: float | int | bool | str,
    unit: str = "",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> dict[str, Any]:
    """A measured value with its unit ("s", "GB/s", "share" of 1, "" for a plain ratio) and the limit it should keep.

    A bool stands for something that should be so: it is met when true.

    Raises:
        ValueError: both limits are given.
    """
    if at_most is not None and at_least is not None:
        raise ValueError(f"one limit per figure: both at_most={at_most} and at_least={at_least} are given")
    entry: dict[str, Any] = {"value": value, "unit": unit}
    if isinstance(value, bool):
        return {**entry, "limit": "yes", "met": value}
    if at_most is not None:
        return {**entry, "limit": f"≤ {shown(at_most, unit)}", "met": float(value) <= at_most}
    if at_least is not None:
        return {**entry, "limit": f"≥ {shown(at_least, unit)}", "met": float(value) >= at_least}
    return entry


def shown(value: Any, unit: str = "") -> str:
    """A figure for people: three significant digits, ratios to three places, shares in percent, yes and no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return f"{value} {unit}".rstrip()
    if unit == "share":
        return "< 0.001%" if 0 < abs(value) < 1e-5 else f"{100 * value:.3g}%"
    if isinstance(value, int) or abs(value) >= 1000:
        digits = f"{value:,.0f}"
    else:
        digits = f"{value:.3f}" if unit == "" and 0.1 <= abs(value) < 10 else f"{value:.3g}"  # ratios are near 1
    return f"{digits} {unit}".rstrip()
