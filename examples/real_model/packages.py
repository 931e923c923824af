"""Packages that only this example needs, from PyPI into a folder of their own, at fixed versions."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def installed(packages: Sequence[str]) -> Iterator[Path]:
    """Install packages, without those that they name, into a folder that Python looks into first; delete it at the end.

    Raises:
        SystemExit: pip failed, and has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        status = subprocess.run([*pip, "--target", folder, *packages], check=False).returncode
        if status:
            raise SystemExit(f"pip could not install {', '.join(packages)} (exit status {status})")
        sys.path.insert(0, folder)
        yield Path(folder)
        sys.path.remove(folder)
