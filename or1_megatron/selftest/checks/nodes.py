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
from or1_megatron.config.hardware import hardware_of
from or1_megatron.runtime.world import choose_gloo_interface
from or1_megatron.selftest.one_check import CheckFailed, Context
from or1_megatron.selftest.plans import DEADLINE_S
from or1_megatron.selftest.provenance import GPU_QUERY, commit, printed
from or1_megatron.selftest.run_checks import RESULTS

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
_SHOWN = 20
_NETWORK_SHARE = 0.6  # of the adapter that a GPU has to itself


def nodes(context: Context) -> None:
    """Gather and compare; every node comes to the same result."""
    cuda = context.machine.cuda
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    mine = {"facts": facts(), "host": socket.gethostname(), "results": _results()}
    choose_gloo_interface()  # after the facts: the nodes may choose different ones
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=DEADLINE_S))
    count = dist.get_world_size()
    everyone: list[Any] = [None] * count
    dist.all_gather_object(everyone, mine)
    names = [f"node {index} ({node['host']})" for index, node in enumerate(everyone)]
    (context.out / "nodes.json").write_text(json.dumps(dict(zip(names, everyone, strict=True)), indent=1))
    skew_s, exchange_s = clocks()
    context.measure("nodes", count)
    context.measure("hosts", len({node["host"] for node in everyone}), at_least=count)
    context.require("clocks apart", skew_s, "s", at_most=2.0)
    context.measure("smallest message to all and back", exchange_s * 1e3, "ms")
    context.measure("all-gather over gloo, from each node", all_gather_gb_s("cpu"), "GB/s")
    if cuda:
        name, expected = "all-gather over NCCL, one GPU of each node", network_gb_s(torch.cuda.get_device_name())
        context.measure(f"{name}, from each node", all_gather_gb_s("cuda"), "GB/s", at_least=expected)
    apart = [line for kind in ("facts", "results") for line in differences([node[kind] for node in everyone], names)]
    context.require("facts that differ between nodes", len(apart), at_most=0)
    dist.destroy_process_group()
    if apart:
        more = f"; and {len(apart) - _SHOWN} more in nodes.json" if len(apart) > _SHOWN else ""
        raise CheckFailed("; ".join(apart[:_SHOWN]) + more)


def _results() -> dict[str, str]:
    """Return how the checks before this one ended here."""
    ended = os.environ.get(RESULTS, "")
    return {f"check {name}": status for name, _, status in (pair.partition("=") for pair in ended.split(",")) if name}


def clocks(rounds: int = 10) -> tuple[float, float]:
    """Return how far the nodes' clocks are apart, and the seconds of an exchange, which bound the error: the best of
    some rounds."""
    apart, took = [], []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))  # a barrier that leaves GPUs alone
        now_s = time.time()
        started_s = time.perf_counter()
        everyone: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, now_s)
        took.append(time.perf_counter() - started_s)
        apart.append(max(everyone) - min(everyone))
    best = torch.tensor([min(apart), min(took)], dtype=torch.float64)
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    return float(best[0]), float(best[1])


def network_gb_s(gpu: str) -> float | None:
    """Return the rate that is expected of one GPU between nodes; None if its hardware is not known."""
    card = hardware_of(gpu)
    return card.network_bytes_per_s.value / 1e9 * _NETWORK_SHARE if card else None


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
        values = [node.get(key) for node in nodes]
        usual = Counter(values).most_common(1)[0][0]
        others = [f"{_said(value)} on {name}" for name, value in zip(names, values, strict=True) if value != usual]
        if others:
            where = ", ".join(name for name, value in zip(names, values, strict=True) if value == usual)
            lines.append(f"{key}: {_said(usual)} on {where}; {'; '.join(others)}")
    return lines


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
    counts = Counter((printed(GPU_QUERY) or "").splitlines())
    return "; ".join(f"{count} x {line}" for line, count in counts.items()) or "none"


def _size(folder: str) -> str:
    return f"{shutil.disk_usage(folder).total / 2**30:.0f} GiB" if Path(folder).is_dir() else "not there"
