"""The wheels that lab/benchmarks/gpu/run.sh names for a machine with PyTorch, Triton and transformers alone.

Not proven: that a machine's own versions of these three suit ours, and that the checks start with these wheels alone.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.gpu_lock import read_lock

ROOT = Path(__file__).parents[2]
IMAGE = ("torch", "triton", "transformers")


def documented() -> list[str]:
    """Return the arguments of the pip command in run.sh's help."""
    text = re.sub(r"\\\n#", " ", (ROOT / "lab/benchmarks/gpu/run.sh").read_text())
    line = re.search(r"pip (download .*)", text)
    assert line is not None
    return line[1].split()


def pins() -> dict[str, str]:
    return dict(word.split("==") for word in documented() if "==" in word)


def needed_by(names: Iterable[str]) -> set[str]:
    """Return the packages and all that they require, as their installed metadata says."""
    needed: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in needed:
            continue
        needed.add(name)
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return needed


def test_the_wheels_are_of_tested_versions_and_complete() -> None:
    """typing-extensions is listed though transformers brings one: pydantic wants a newer one than old images have."""
    assert pins().items() <= read_lock("cpu.lock").items()
    assert needed_by(pins()) - needed_by(IMAGE) <= pins().keys()
    assert "typing-extensions" in pins()
