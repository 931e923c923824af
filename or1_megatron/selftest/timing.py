"""Measures the rates of copies and matrix products, the times of calls, and free memory on this process's device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch


def sync() -> None:
    """Wait for the work on all GPUs, because a copy between two GPUs may run on a stream of either GPU."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.synchronize(index)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that one call of ``work`` takes, including its work on GPUs."""
    sync()
    started_s = time.perf_counter()
    work()
    sync()
    return time.perf_counter() - started_s


def mean_seconds(work: Callable[[], object], times: int = 10) -> float:
    """Return the mean seconds of ``times`` calls of ``work``. Three calls before them do not count."""
    for _ in range(3):
        work()
    return seconds_of(lambda: [work() for _ in range(times)]) / times


def copy_gb_per_s(source: str, target: str, size: int, times: int = 10) -> float:
    """Return the rate in GB/s of copies of ``size`` bytes between two devices; "host" is page-locked host memory."""

    def memory(where: str) -> torch.Tensor:
        if where == "host":
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        return torch.zeros(size, dtype=torch.uint8, device=where)

    there, here = memory(target), memory(source)
    return size / mean_seconds(lambda: there.copy_(here, non_blocking=True), times) / 1e9


def matmul_tflops(size: int) -> float:
    """Return the rate, in TFLOP/s, of a square bf16 matrix product on this device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / mean_seconds(lambda: a @ b) / 1e12


def free_bytes() -> int:
    """Return the free bytes of this process's GPU; 0 without a GPU.

    Under torchrun this is the GPU of the local rank, even before the rank has set its device.
    """
    return torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))[0] if torch.cuda.is_available() else 0
