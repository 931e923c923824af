"""The handoff's GPU transports between processes: every byte arrives. Engines, and rates, are not tried here.

CUDA IPC needs one GPU, NCCL two. Written where there is none: not run yet.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
SIZES = {"tensors": 3, "rows": 4099, "bucket_bytes": 4 << 20}


@pytest.fixture
def hand_off() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
    import handoff

    return handoff.hand_off


@pytest.mark.parametrize(("trainers", "engines"), [(1, 1), (2, 2)])
def test_cuda_ipc(hand_off: Any, trainers: int, engines: int) -> None:
    assert hand_off("cuda_ipc", trainers, engines, **SIZES)


@pytest.mark.parametrize("transport", ["nccl", "nccl+cuda_ipc"])
def test_nccl(hand_off: Any, transport: str) -> None:
    import torch

    if (gpus := torch.cuda.device_count()) < 2:
        pytest.skip("needs two GPUs")
    ranks = gpus // 2 if transport == "nccl" else gpus
    assert hand_off(transport, ranks, ranks, **SIZES)
