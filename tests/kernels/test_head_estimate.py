"""The head's expected time and the tile sizes that follow from it, against figures worked by hand.

Not proven here: that a GPU's products run in whole waves of tiles of 128 x 256, or at the assumed rates
(docs/performance.md has the times on an H100).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from or1_megatron.config.hardware import Constant, read_hardware
from or1_megatron.kernels.estimate import head_seconds, wave_efficiency
from or1_megatron.kernels.plan import BUDGET_BYTES, allocation_plan

TOKENS, HIDDEN, ROWS = 32768, 5120, 152064  # Qwen2.5-32B
H100 = read_hardware("h100")


@pytest.mark.parametrize(("mode", "tile", "shares", "ms"), [
    # 4 x 15 tiles. 2,560 of 20 x 132 tiles of logits, 1,280 of 10 x 132 of dH, 1,600 of 13 x 132 of dW.
    # Products: (2 / 0.964 + 1 / 0.970 + 1 / 0.923) x 64.49 ms, where waves that are not full and the smaller last block
    # count; then 49.8 + 24.9 + 20.1 GB.
    ("recompute", (8192, 10176), (0.970, 0.970, 0.932), 292),
    # 16 x 1 tiles. 72 full waves of logits; 320 of 3 x 132; 180 full waves. Products: (1 + 1 / 0.808 + 1) x 64.49 ms;
    # then 49.8 + 99.7 + 1.3 GB.
    ("one_pass", (2048, 152064), (1.0, 0.808, 1.0), 244),
    # What is chosen. 4 x 18 tiles: 2,112 = 16 x 132 of logits, 1,280 of 10 x 132, 1,320 = 10 x 132.
    ("recompute", (8192, 8448), (1.0, 0.970, 1.0), 283),
    # 8 x 1 tiles: 144 full waves, 640 of 5 x 132, 180 full waves.
    ("one_pass", (4096, 152064), (1.0, 0.970, 1.0), 219),
])  # fmt: skip
def test_qwen_32b_on_h200(mode: Any, tile: tuple[int, int], shares: tuple[float, ...], ms: float) -> None:
    """8 or 6 x 32,768 x 5,120 x 152,064 operations at 0.8 x 989 TFLOP/s, bytes at 0.9 x 4.8 TB/s."""
    t, v = tile
    assert [wave_efficiency(*of, 132) for of in ((t, v), (t, HIDDEN), (v, HIDDEN))] == pytest.approx(shares, abs=5e-4)
    seconds = head_seconds(TOKENS, HIDDEN, ROWS, t, v, mode, read_hardware("h200"))
    assert seconds * 1e3 == pytest.approx(ms, abs=0.5)


def test_a_small_call_by_hand() -> None:
    """200 tokens, H 256, 300 rows in tiles of 128 x 256 on 2 SMs of 2^24 operations a second together, 1 MB/s.

    Tiles of tokens: 128 and 72; blocks of rows: 256 and 44; all of one 128 x 256 result tile but dW of 256 rows, which
    has two. Each product takes one wave on 2 SMs: 2 x 2 x 128 x 256 / 2^24 = 1/128 s per number that is summed over.
    One pass of the 4: logits 4 x 256, dH 2 x (256 + 44), dW 2 x (128 + 72): 2,024 / 128 s.
    """
    rates = {
        "multiprocessors": 2,
        "bf16_flops": 2.0**24,
        "product_share": 1,
        "memory_bytes_per_s": 1e6,
        "memory_share": 1,
    }
    made = {name: Constant(value=value, source="made up") for name, value in rates.items()}
    seconds = head_seconds(200, 256, 300, 128, 256, "one_pass", H100.model_copy(update=made))
    moved = 200 * 300 * 10 + 2 * 8 * 300 * 256 + 2 * 8 * 200 * 256
    assert seconds == pytest.approx(2024 / 128 + moved / 1e6)


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
@pytest.mark.parametrize(
    ("tokens", "rows"), [(32768, 152064), (24000, 152064), (36864, 76032), (30011, 19008), (1, 61)]
)
def test_no_other_size_is_much_faster(mode: Any, tokens: int, rows: int) -> None:
    """No way to cut tokens and rows into up to twice as many pieces within the budget is expected to be more than 3%
    faster than the chosen one, which is searched for in fewer."""
    plan = allocation_plan(tokens, HIDDEN, rows, torch.bfloat16, mode)

    def seconds(t: int, v: int) -> float:
        return head_seconds(tokens, HIDDEN, rows, t, v, mode, H100)

    def pieces(whole: int, size: int) -> list[int]:
        return [-(-whole // count) for count in range(1, 2 * -(-whole // size) + 1)]

    widths = pieces(rows, plan.block_rows) if mode == "recompute" else [rows]
    sizes = [
        (t, v) for t in pieces(tokens, plan.tile_tokens) for v in widths if 4 * t * v <= BUDGET_BYTES["cuda", mode]
    ]
    assert seconds(plan.tile_tokens, plan.block_rows) <= 1.03 * min(seconds(*size) for size in sizes)
