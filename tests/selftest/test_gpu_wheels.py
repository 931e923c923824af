"""The wheels that lab/benchmarks/gpu/run.sh names for a machine with PyTorch, Triton and transformers alone.

Not proven: that a machine's own versions of these three suit ours.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from or1_megatron.selftest.known_checks import CHECKS
from or1_megatron.selftest.one_check import CHECKS_PACKAGE
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
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def test_the_wheels_are_of_tested_versions_and_complete() -> None:
    """typing-extensions is listed though transformers brings one: pydantic wants a newer one than old images have."""
    assert pins().items() <= read_lock("cpu.lock").items()
    assert needed_by(pins()) - needed_by(IMAGE) <= pins().keys()
    assert "typing-extensions" in pins()


MODULES = {
    check.module or CHECKS_PACKAGE + check.name.replace("-", "_")
    for check in CHECKS
    if set(check.needs) <= {"cuda", "megatron"}
}
PROGRAMS = f"""
import importlib
import or1_megatron.commands.app
import or1_megatron.parallel.check_parity
import or1_megatron.selftest.run_checks

for module in {sorted(MODULES)}:
    importlib.import_module(module)
"""
"""Imports what run.sh starts on such a machine."""


@pytest.mark.slow
def test_the_programs_start_with_them(tmp_path: Path) -> None:
    """In a Python that sees PyTorch, Triton, transformers, what these need, and the downloaded wheels."""
    site, wheels, extra = tmp_path / "image", tmp_path / "wheels", tmp_path / "site"
    site.mkdir()
    for name in needed_by(IMAGE):
        for top in {file.parts[0] for file in importlib.metadata.files(name) or () if file.parts[0] != ".."}:
            installed = Path(sysconfig.get_path("purelib"), top)
            if installed.exists() and not (site / top).exists():
                (site / top).symlink_to(installed)
    command = [word.replace("FOLDER", str(wheels)) for word in documented()]
    command[command.index("--python-version") + 1] = f"{sys.version_info.major}.{sys.version_info.minor}"
    done = subprocess.run([sys.executable, "-m", "pip", *command, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        assert "No matching distribution" not in done.stderr or "from versions: none" in done.stderr, done.stderr
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(extra)]
    subprocess.run([*install, *map(str, wheels.glob("*.whl"))], check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, extra, site)))}
    program = [sys.executable, "-S", "-c", PROGRAMS]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
