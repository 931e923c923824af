"""Devices and links: memory bandwidth, the rate of a matrix product, copies to the host and to other devices,
all-reduce. On CPU, processes stand for devices, and nothing is known of what to expect."""

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
from or1_megatron.selftest.plans import DEADLINE_S
from or1_megatron.selftest.process import on_ranks
from or1_megatron.selftest.timing import copy_gb_per_s, matmul_tflops, mean_seconds

_SHARE: Final = {"compute": 0.65, "memory": 0.75, "host": 0.6, "link": 0.6}
"""What a healthy device reaches of its datasheet; less is worth a look at clocks, slots and topology."""


def devices(context: Context) -> None:
    machine = context.machine
    size = (1 << 30) if machine.cuda else (64 << 20)
    for index in range(machine.devices if machine.cuda else 1):
        one_device(context, index, size)
    if machine.cuda and machine.devices > 1:
        pairs(context, size)
    if machine.devices > 1:
        all_reduce(context, size // 4)
    if machine.cuda:
        topology()


def one_device(context: Context, index: int, size: int) -> None:
    """Measure one device by itself."""
    cuda = context.machine.cuda
    name = f"GPU {index}" if cuda else "CPU"
    card = hardware_of(torch.cuda.get_device_name(index)) if cuda else None
    if cuda:
        torch.cuda.set_device(index)
        context.measure(f"{name}: memory", torch.cuda.get_device_properties(index).total_memory / 2**30, "GiB")
    here = "cuda" if cuda else "cpu"
    copied = 2 * copy_gb_per_s(here, here, size)  # read and written
    expected = card.memory_bytes_per_s.value / 1e9 * _SHARE["memory"] if card else None
    context.measure(f"{name}: copy within its memory", copied, "GB/s", at_least=expected)
    expected = card.bf16_flops.value / 1e12 * _SHARE["compute"] if card else None
    rate = matmul_tflops(8192 if cuda else 512)
    context.measure(f"{name}: bf16 matrix product", rate, "TFLOP/s", at_least=expected)
    if cuda:
        expected = card.host_bytes_per_s.value / 1e9 * _SHARE["host"] if card else None
        for way, ends in (("to the host", ("cuda", "host")), ("from the host", ("host", "cuda"))):
            context.measure(f"{name}: copy {way}", copy_gb_per_s(*ends, size), "GB/s", at_least=expected)


def pairs(context: Context, size: int) -> None:
    """Copy from each GPU to the next one."""
    count = context.machine.devices
    for index in range(count):
        other = (index + 1) % count
        card = hardware_of(torch.cuda.get_device_name(index))
        expected = card.link_bytes_per_s.value / 1e9 * _SHARE["link"] if card else None
        rate = copy_gb_per_s(f"cuda:{index}", f"cuda:{other}", size)
        context.measure(f"GPU {index} to GPU {other}", rate, "GB/s", at_least=expected)


def all_reduce(context: Context, size: int) -> None:
    """Sum over all devices, NCCL on GPUs and gloo on CPU: right, and how fast."""
    ranks = context.machine.devices
    summed = on_ranks("or1_megatron.selftest.checks.devices:one_rank", {"size": size}, ranks, "the all-reduce")
    context.require("all-reduce: the sum is right", summed["right"])
    card = hardware_of(torch.cuda.get_device_name()) if context.machine.cuda else None
    expected = card.link_bytes_per_s.value / 1e9 * _SHARE["link"] if card else None
    rate = 2 * (ranks - 1) / ranks * size / summed["seconds"] / 1e9  # what a ring carries in each direction
    context.measure(f"all-reduce over {ranks}, bus bandwidth", rate, "GB/s", at_least=expected)


def topology() -> None:
    """Print how the GPUs are connected, for the log."""
    subprocess.run(["nvidia-smi", "topo", "-m"], check=False)


def one_rank(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Sum as one rank; rank 0 notes whether the sum is right, and its seconds."""
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
