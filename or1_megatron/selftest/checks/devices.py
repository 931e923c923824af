"""Self-test of devices and links: memory bandwidth, matrix products, copies to host and other devices, all-reduce.
On a CPU, processes stand for devices, and rates have no lower limit."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from or1_megatron.config.hardware import hardware_of
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.process import on_ranks
from or1_megatron.selftest.setups import DEADLINE_S
from or1_megatron.selftest.timing import copy_gb_per_s, matmul_tflops, mean_seconds

_SHARE: Final = {
    "bf16_flops": 0.65,
    "memory_bytes_per_s": 0.75,
    "host_bytes_per_s": 0.6,
    "link_bytes_per_s": 0.6,
}
"""Share of the data sheet's rate that a healthy device reaches. If it is slower, check clocks, slots and topology."""


def expected_rate(gpu: str, rate: str) -> float | None:
    """Return a GPU's expected rate in 1e9 bytes or operations per second; None if no hardware file describes the GPU.

    Args:
        gpu: the GPU's name; "" for a CPU.
        rate: a key of a hardware file, and of ``_SHARE``.
    """
    card = hardware_of(gpu) if gpu else None
    return getattr(card, rate).value / 1e9 * _SHARE[rate] if card else None


def devices(context: Context) -> None:
    machine = context.machine
    size = (1 << 30) if machine.cuda else (64 << 20)
    names = [torch.cuda.get_device_name(index) for index in range(machine.devices)] if machine.cuda else [""]
    for index, name in enumerate(names):
        one_device(context, index, name, size)
    if len(names) > 1:
        for index, name in enumerate(names):
            other = (index + 1) % len(names)
            rate = copy_gb_per_s(f"cuda:{index}", f"cuda:{other}", size)
            expected = expected_rate(name, "link_bytes_per_s")
            context.measure(f"GPU {index} to GPU {other}", rate, "GB/s", at_least=expected)
    if machine.devices > 1:
        all_reduce(context, names[0], size // 4)
    if machine.cuda:
        subprocess.run(["nvidia-smi", "topo", "-m"], check=False)  # how the GPUs are connected, for the log


def one_device(context: Context, index: int, name: str, size: int) -> None:
    """Measure memory, matrix products and copies of one device alone. ``name``: the GPU's name; "" for the CPU."""
    what, here = (f"GPU {index}", "cuda") if name else ("CPU", "cpu")
    copies = {"copy within its memory": (here, here, 2, "memory_bytes_per_s")}  # read and written
    if name:
        torch.cuda.set_device(index)
        context.measure(f"{what}: memory", torch.cuda.get_device_properties(index).total_memory / 2**30, "GiB")
        copies["copy to the host"] = ("cuda", "host", 1, "host_bytes_per_s")
        copies["copy from the host"] = ("host", "cuda", 1, "host_bytes_per_s")
    for way, (source, target, times, rate) in copies.items():
        copied = times * copy_gb_per_s(source, target, size)
        context.measure(f"{what}: {way}", copied, "GB/s", at_least=expected_rate(name, rate))
    product, expected = matmul_tflops(8192 if name else 512), expected_rate(name, "bf16_flops")
    context.measure(f"{what}: bf16 matrix product", product, "TFLOP/s", at_least=expected and expected / 1e3)


def all_reduce(context: Context, gpu: str, size: int) -> None:
    """Check and time an all-reduce over all devices, by NCCL on GPUs and gloo on CPU."""
    ranks = context.machine.devices
    summed = on_ranks(f"{__name__}:one_rank", {"size": size}, ranks, "the all-reduce")
    context.require("all-reduce: the sum is right", summed["right"])
    rate = 2 * (ranks - 1) / ranks * size / summed["seconds"] / 1e9  # what a ring carries in each direction
    expected = expected_rate(gpu, "link_bytes_per_s")
    context.measure(f"all-reduce over {ranks}, bus bandwidth", rate, "GB/s", at_least=expected)


def one_rank(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Run one rank of the all-reduce. Rank 0 notes whether the sum is right, and the seconds of an all-reduce."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=DEADLINE_S))
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), "cuda" if cuda else "cpu"
    values = torch.full((task["size"] // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    right = bool((values == ranks * (ranks + 1) / 2).all())
    values.zero_()
    dist.barrier()
    seconds = mean_seconds(lambda: dist.all_reduce(values))
    if rank == 0:
        note({"right": right, "seconds": seconds})
    dist.destroy_process_group()
