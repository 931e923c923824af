"""What the head allocates: by arithmetic at a large model's sizes, and counted by torch's allocator at small ones.

Not proven here: the allocations on a GPU (`or1 selftest kernels`), and what the GEMM library keeps to itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import forward_and_backward
from torch.profiler import ProfilerActivity, profile

from or1_megatron.kernels.tile_sizes import allocation_plan


@pytest.mark.parametrize(("mode", "limit_bytes", "logits_bytes"), [
    # 8,192 tokens by 152,064 / 15 rows, up to a multiple of 64; 32,768 / 8 tokens by all rows
    ("recompute", 350e6, 8192 * 10176 * 4),
    ("one_pass", 2.6e9, 4096 * 152064 * 4),
])  # fmt: skip
@pytest.mark.parametrize("scratch", [False, True])
def test_32k_tokens_of_qwen_32b(mode: Any, limit_bytes: float, logits_bytes: int, scratch: bool) -> None:
    plan = allocation_plan(32768, 5120, 152064, torch.bfloat16, mode, scratch=scratch)
    assert plan.workspace_bytes <= limit_bytes
    assert plan.tile_tokens * plan.block_rows * plan.blocks * 4 >= 0.75 * limit_bytes
    if not scratch:
        assert 4 * plan.logits_numbers == logits_bytes
        assert plan.workspace_bytes - logits_bytes <= 10e6  # per-token vectors
        assert plan.scratch_numbers == 0
    assert plan.accumulator_bytes == plan.tile_tokens * 5120 * 4


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
@pytest.mark.parametrize("tokens", [0, 1, 63, 1000, 32768, 100_000])
@pytest.mark.parametrize("rows", [0, 1, 61, 19008, 152064])
def test_within_the_budget_at_any_size(mode: Any, tokens: int, rows: int) -> None:
    """All tokens and rows are covered, and logits with scratch keep to the budget."""
    for device_type, budget in (("cuda", 300_000_000), ("cpu", 4 << 20)):
        plan = allocation_plan(
            tokens, 512, rows, torch.float32, mode, device_type=device_type, scratch=True, budget_bytes=budget
        )
        assert 1 <= plan.tile_tokens <= max(tokens, 1)
        if mode == "one_pass":
            assert plan.blocks * plan.block_rows >= rows
        assert 4 * (plan.logits_numbers + plan.scratch_numbers) <= budget


def allocated_peak(work: Any, trace: Path) -> int:
    """Bytes that torch's CPU allocator gave out on top of what it had given before, at the worst moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    events = [event["args"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_allocates_what_the_plan_says(mode: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """At most the plan, and more than half of it: the plan is no idle bound."""
    tokens, width, rows, budget = 700, 64, 3000, 3 << 20
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(rows, (tokens,))
    peak = allocated_peak(lambda: forward_and_backward(mode, hidden, weight, targets, budget), tmp_path / "trace.json")
    plan = allocation_plan(tokens, width, rows, dtype, mode, device_type="cpu", scratch=True, budget_bytes=budget)
    outputs = (tokens + rows) * width * dtype.itemsize
    accumulators = plan.accumulator_bytes + (4 * rows * width)
    beside = outputs + accumulators if dtype != torch.float32 else outputs
    assert peak <= plan.workspace_bytes + beside
    assert peak - beside >= plan.workspace_bytes / 2
