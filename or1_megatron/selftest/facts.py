"""What has to be the same on every node of a cluster, and what differs between nodes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import or1_megatron
import or1_verify
from or1_megatron.selftest.provenance import commit

_PREFIXES: Final = (
    *("CUDA_", "CUBLAS_", "GLOO_", "HF_", "LD_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "OR1_", "PYTHONPATH"),
    *("PATH", "PYTORCH_", "RAY_", "TORCH_", "TRITON_", "UCX_", "VLLM_"),
)
_NOT_COMPARED: Final = (
    *("OR1_SELFTEST_RESULTS", "OR1_LAUNCH", "OR1_TEST_SESSION"),  # ours
    "NVIDIA_VISIBLE_DEVICES",  # Kubernetes names each node's GPUs in it
)
_FOLDERS: Final = ("MODEL", "DATA", "EVAL", "RUNS")
"""Variables that name folders for examples/launch.sh."""


def facts() -> dict[str, str]:
    """Return what this node is, by name."""
    found = {
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "commit": commit(),
        "the code of or1_megatron": _digest(Path(or1_megatron.__file__).parent),
        "the code of or1_verify": _digest(Path(or1_verify.__file__).parent),
        "GPUs and driver": _gpus(),
        "/dev/shm": _size("/dev/shm"),
    }
    for distribution in importlib.metadata.distributions():
        found[f"package {distribution.metadata['Name'].lower()}"] = distribution.version
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES) and name not in _NOT_COMPARED:
            found[f"environment {name}"] = value
    folders = {"the working directory": os.getcwd(), "Python's packages": sys.prefix, "/tmp": tempfile.gettempdir()}
    folders |= {name: os.environ[name] for name in _FOLDERS if os.environ.get(name)}
    for name, folder in folders.items():
        if name != "/tmp":
            found[f"path of {name}"] = folder
        found[f"mount of {name}"] = mount_of(folder)
    return found


def differences(nodes: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return a sentence for each fact in which nodes differ: what most have, and each node that has something else.

    Args:
        nodes: the facts of each.
        names: of the nodes.
    """
    found = []
    for key in sorted(set().union(*nodes)):
        values = [node.get(key) for node in nodes]
        usual = Counter(values).most_common(1)[0][0]
        others = [f"{_said(value)} on {name}" for name, value in zip(names, values, strict=True) if value != usual]
        if others:
            where = ", ".join(name for name, value in zip(names, values, strict=True) if value == usual)
            found.append(f"{key}: {_said(usual)} on {where}; {'; '.join(others)}")
    return found


def _said(value: str | None) -> str:
    return "nothing" if value is None else f"'{value}'"


def mount_of(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the file system that a folder lies on: type, source, and whether it can be written (proc(5))."""
    path, best = os.path.realpath(folder), ("", "unknown")
    for line in mounts.read_text().splitlines():
        fields = line.split()
        point, rest = fields[4], fields[fields.index("-") + 1 :]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, f"{rest[0]} {rest[1]} at {point}, {fields[5].split(',')[0]}")
    return best[1]


def _digest(folder: Path) -> str:
    """Return a digest of a folder's Python files: a copy of the tree has no commit."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _gpus() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return "none"
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")
    return "; ".join(f"{count} x {line}" for line, count in Counter(filter(None, lines)).items())


def _size(folder: str) -> str:
    return f"{shutil.disk_usage(folder).total / 2**30:.0f} GiB" if Path(folder).is_dir() else "not there"


def host() -> str:
    return socket.gethostname()
