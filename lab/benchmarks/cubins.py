"""Compiles every Triton kernel for Hopper (sm_90), without a GPU, and reads the resources that each takes of an SM.

    python lab/benchmarks/cubins.py

The launchers of ``TritonEpilogue`` are called on small CPU tensors, with the dtypes and options of training; a launch
only compiles. Triton compiles separately for widths that are multiples of 16 and for other widths, and in statistics
also for kinds of token counts. The limits: at most 64 registers per thread, so that an SM with its 65,536 registers
holds four programs of 256 threads; no spilled registers; shared memory only for reductions over eight warps; loads of
16 bytes in rows whose width is a multiple of 16. The compiled kernels do not run here; tests check their results with
Triton's interpreter.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from result import figure, shown, write_result
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import or1_megatron.kernels
from or1_megatron.kernels.sampling_triton import sample_rows
from or1_megatron.kernels.statistics import Scores
from or1_megatron.kernels.tiles_triton import TritonEpilogue

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WIDTHS = {"width of 16s": 19008, "any width": 19009}
DTYPES = (torch.float32, torch.bfloat16)
Compiled = tuple[JITFunction[Any], Any]
"""A kernel, and its compiled form for one kind of arguments."""


@contextmanager
def compiling(seen: list[Compiled]) -> Iterator[None]:
    """Within the block, each launch of a kernel only compiles it, into a new folder, and appends it to ``seen``."""
    launch = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *arguments: Any, **options: Any) -> None:
        seen.append((kernel, launch(kernel, *arguments, **{**options, "warmup": True})))

    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGET,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    triton.runtime.driver.set_active(driver)
    JITFunction.run = compile_only
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            yield
    finally:
        JITFunction.run = launch


def compile_all() -> dict[str, Compiled]:
    """Compile all kernels, and return every compiled variant by name."""
    epilogue, found = TritonEpilogue(), dict[str, Compiled]()
    seen: list[Compiled] = []
    tokens = 16
    vectors = [torch.zeros(tokens) for _ in range(6)]
    columns, scores = torch.zeros(tokens, dtype=torch.int64), Scores(*vectors[:4])
    with compiling(seen):
        for kind, width in WIDTHS.items():
            logits = torch.zeros(tokens, 64 * -(-width // 64))[:, :width]
            for rows, kind_of_rows in ((tokens, ""), (9, ", any tokens"), (1, ", one token")):
                epilogue.statistics(logits[:rows], columns[:rows], torch.zeros(4, rows))
                found[f"statistics, {kind}{kind_of_rows}"] = seen[-1]
            for dtype, entropy in product(DTYPES, (True, False)):
                epilogue.gradient(logits, columns, None, scores, vectors[4], vectors[5] if entropy else None, dtype)
                name = f"gradient, {str(dtype).removeprefix('torch.')}, {kind}{'' if entropy else ', no entropy'}"
                found[name] = seen[-1]
            for dtype in DTYPES:
                sample_rows(logits.to(dtype), columns, *vectors[:3])
                found[f"sampling, {str(dtype).removeprefix('torch.')}, {kind}"] = seen[-1]
    return found


def all_kernels() -> set[JITFunction[Any]]:
    package = or1_megatron.kernels
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}


def figures(name: str, compiled: Any) -> dict[str, Any]:
    """Return registers and spills per thread, shared memory per program, and the widest load from global memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        used, code = (
            subprocess.run([TOOLS / tool, option, cubin.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "--print-code"))
        )
    fields = {field: int(value) for field, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
    found = {
        f"{name}: registers": figure(fields["REG"], at_most=64),
        f"{name}: spilled": figure(fields["STACK"] + fields["LOCAL"], "B", at_most=0),
        f"{name}: shared memory": figure(compiled.metadata.shared, "B", at_most=256),
    }
    if "width of 16s" in name:
        loads = [int(bits or 32) // 8 for bits in re.findall(r"\bLDG\.E(?:\.(64|128))?\b", code)]
        found[f"{name}: widest load"] = figure(max(loads), "B", at_least=16)
    return found


def main() -> None:
    variants = compile_all()
    if left := all_kernels() - {kernel for kernel, _ in variants.values()}:
        raise SystemExit(f"cubins.py: no variant compiles {', '.join(sorted(kernel.__name__ for kernel in left))}")
    found = {}
    for name, (_, compiled) in variants.items():
        found |= figures(name, compiled)
    path = write_result("cubins", found, {"target": f"sm_{TARGET.arch}"})
    for name, entry in found.items():
        print(f"{name}: {shown(entry['value'], entry['unit'])} {entry.get('limit', '')}")
    print(path)


if __name__ == "__main__":
    main()
