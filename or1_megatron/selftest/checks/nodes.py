"""Several nodes: the facts of each are gathered over gloo and compared, clocks too, and the network is measured."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import or1_megatron
import or1_verify
from or1_megatron.runtime.world import choose_gloo_interface
from or1_megatron.selftest.checks.devices import expected_rate
from or1_megatron.selftest.one_check import CheckFailed, Context
from or1_megatron.selftest.plans import DEADLINE_S
from or1_megatron.selftest.provenance import GPU_QUERY, commit, printed

_PREFIXES: Final = (
    *("CUDA_", "CUBLAS_", "GLOO_", "HF_", "LD_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "OR1_", "PYTHONPATH"),
    *("PATH", "PYTORCH_", "RAY_", "TORCH_", "TRITON_", "UCX_", "VLLM_"),
)
_NOT_COMPARED: Final = ("OR1_LAUNCH", "OR1_TEST_SESSION", "NVIDIA_VISIBLE_DEVICES")
"""Ours, and where Kubernetes names each node's own GPUs."""
_FOLDERS: Final = ("MODEL", "DATA", "EVAL", "RUNS")
"""Variables that name folders for examples/launch.sh."""
_SHOWN: Final = 20


def nodes(context: Context) -> None:
    """Gather and compare; every node comes to the same result."""
    cuda = context.machine.cuda
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    ended = json.loads((context.out / "selftest.json").read_text())["outcomes"]
    results = {f"check {outcome['name']}": outcome["status"] for outcome in ended}
    mine = {"facts": facts() | results, "host": socket.gethostname()}
    choose_gloo_interface()  # after the facts: the nodes may choose different ones
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=DEADLINE_S))
    count = dist.get_world_size()
    everyone: list[Any] = [None] * count
    dist.all_gather_object(everyone, mine)
    names = [f"node {index} ({node['host']})" for index, node in enumerate(everyone)]
    (context.out / "nodes.json").write_text(json.dumps(dict(zip(names, everyone, strict=True)), indent=1))
    context.measure("hosts", len({node["host"] for node in everyone}), at_least=count)
    context.require("clocks apart", clocks_apart_s(), "s", at_most=2.0)
    context.measure("all-gather over gloo, from each node", all_gather_gb_s("cpu"), "GB/s")
    if cuda:
        name = "all-gather over NCCL, one GPU of each node, from each node"
        expected = expected_rate(torch.cuda.get_device_name(), "network_bytes_per_s")  # a GPU's own adapter
        context.measure(name, all_gather_gb_s("cuda"), "GB/s", at_least=expected)
    apart = differences([node["facts"] for node in everyone], names)
    context.require("facts that differ between nodes", len(apart), at_most=0)
    dist.destroy_process_group()
    if apart:
        more = f"; and {len(apart) - _SHOWN} more in nodes.json" if len(apart) > _SHOWN else ""
        raise CheckFailed("; ".join(apart[:_SHOWN]) + more)


def clocks_apart_s(rounds: int = 10) -> float:
    """Return how far the nodes' clocks are apart, in the best of some rounds: an exchange's own time adds to it."""
    apart = []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))  # a barrier that leaves GPUs alone
        everyone: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, time.time())
        apart.append(max(everyone) - min(everyone))
    return min(apart)


def all_gather_gb_s(device: str) -> float:
    """Return what each node sends per second while all gather from all."""
    mine = torch.ones((16 if device == "cpu" else 256) << 20, dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    seconds = []
    for _ in range(4):
        dist.all_reduce(torch.zeros(1))  # over gloo: all begin together
        started_s = time.perf_counter()
        dist.all_gather(everyone, mine)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return mine.numel() * (dist.get_world_size() - 1) / statistics.median(seconds) / 1e9


def facts() -> dict[str, str]:
    """Return what this node is, by name."""
    named = {
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "commit": commit(),
        "the code of or1_megatron": _digest(Path(or1_megatron.__file__).parent),
        "the code of or1_verify": _digest(Path(or1_verify.__file__).parent),
        "GPUs and driver": _gpus(),
        "/dev/shm": _size("/dev/shm"),
    }
    for distribution in importlib.metadata.distributions():
        named[f"package {distribution.metadata['Name'].lower()}"] = distribution.version
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES) and name not in _NOT_COMPARED:
            named[f"environment {name}"] = value
    folders = {"the working directory": os.getcwd(), "Python's packages": sys.prefix, "/tmp": tempfile.gettempdir()}
    folders |= {name: os.environ[name] for name in _FOLDERS if os.environ.get(name)}
    for name, folder in folders.items():
        if name != "/tmp":
            named[f"path of {name}"] = folder
        named[f"mount of {name}"] = mount_of(folder)
    return named


def differences(nodes: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return a sentence for each fact in which nodes differ: what most have, and each node that has something else.

    Args:
        nodes: the facts of each.
        names: of the nodes.
    """
    lines = []
    for key in sorted(set().union(*nodes)):
        values = [f"'{node[key]}'" if key in node else "nothing" for node in nodes]
        usual = Counter(values).most_common(1)[0][0]
        others = [f"{value} on {name}" for name, value in zip(names, values, strict=True) if value != usual]
        if others:
            where = ", ".join(name for name, value in zip(names, values, strict=True) if value == usual)
            lines.append(f"{key}: {usual} on {where}; {'; '.join(others)}")
    return lines


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
    counts = Counter((printed(GPU_QUERY) or "").splitlines())
    return "; ".join(f"{count} x {line}" for line, count in counts.items()) or "none"


def _size(folder: str) -> str:
    return f"{shutil.disk_usage(folder).total / 2**30:.0f} GiB" if Path(folder).is_dir() else "not there"
