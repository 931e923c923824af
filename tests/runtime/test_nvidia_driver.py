"""An NVIDIA driver that is too old (a library that is compiled here), beside a torch that must not be imported.

Not proven: what NVIDIA's own library answers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from or1_megatron.runtime import nvidia_driver

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose driver offers CUDA 12.8 and whose torch, for 13.0, cannot be imported."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    source = tmp_path / "libcuda.c"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 12080; return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "torch/version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "LD_LIBRARY_PATH": str(tmp_path)}


@pytest.mark.parametrize(
    "command",
    [
        ["train", "quickstart"],
        ["check-parity", "model"],
        ["selftest"],
        ["eval", "--model", "model", "--data", "math500", "--out", "out"],
    ],
    ids=lambda command: command[0],
)
def test_commands_refuse_it_before_torch_is_imported(machine: dict[str, str], command: list[str]) -> None:
    program = [sys.executable, "-m", "or1_megatron.commands.app", *command]
    done = subprocess.run(program, env=machine, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "offers CUDA 12.8, and torch is built for CUDA 13.0" in done.stderr
    assert "series 580 or newer" in done.stderr
    assert "cuda-compat-13-0" in done.stderr


def test_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What version.py says is what torch says. On CPU no driver is too old."""
    import torch

    version = nvidia_driver.torch_cuda()
    assert torch.version.cuda == (None if version is None else f"{version[0]}.{version[1]}")
    monkeypatch.setattr(nvidia_driver, "torch_cuda", lambda: None)
    monkeypatch.setattr(nvidia_driver, "driver_cuda", lambda: (11, 4))
    assert nvidia_driver.driver_problem() == ""


@pytest.mark.parametrize(
    ("wanted", "offered", "old"),
    [((13, 0), (12, 8), True), ((13, 0), (13, 0), False), ((13, 2), (13, 0), False), ((12, 6), (13, 0), False),
     ((13, 0), None, False)],
)  # fmt: skip
def test_what_is_too_old(
    monkeypatch: pytest.MonkeyPatch, wanted: tuple[int, int], offered: tuple[int, int] | None, old: bool
) -> None:
    """Within one major version CUDA is compatible; without a driver there is no GPU that could be missed."""
    monkeypatch.setattr(nvidia_driver, "torch_cuda", lambda: wanted)
    monkeypatch.setattr(nvidia_driver, "driver_cuda", lambda: offered)
    assert bool(nvidia_driver.driver_problem()) is old
