"""Measures a policy's update (forward, backward, optimizer step) on one GPU: tokens per second, MFU, peak memory.

    python lab/benchmarks/throughput.py           # every row in a process of its own, the first row again at the end
    python lab/benchmarks/throughput.py --tiny    # without a GPU: shows only that this program works

The models are random Qwen2 in bf16 with fp32 master weights and our own layers; rows differ in size, recomputation and
form of the head. MFU counts attention, but no recomputation. A 3B fits only with full recomputation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from result import figure, write_result

from or1_megatron.config.hardware import hardware_of
from or1_megatron.parallel.mesh import Mesh, stop_process_group
from or1_megatron.rl.packing import SequenceCost
from or1_megatron.selftest.models import OBJECTIVE, batch_of, make_policy, one_rank, random_qwen2
from or1_megatron.selftest.timing import seconds_of
from or1_megatron.weights.shape import Shape

ROW_TOKENS: Final = 16384
VARIANTS: Final = [("none", "recompute"), ("selective", "recompute"), ("full", "recompute"), ("none", "one_pass")]
ROWS: Final = [
    *((size, *variant) for size in ("0.5B", "1.5B") for variant in VARIANTS),
    ("3B", "full", "recompute"),
    ("3B", "full", "one_pass"),
]
"""(model, recompute, head)."""


def lengths_of(row_tokens: int) -> list[int]:
    """Return log-normal lengths, like those of long-CoT rollouts, which together fill four rows of ``row_tokens``."""
    rng, sigma, lengths = np.random.default_rng(1), 0.8, list[int]()
    while (left := 4 * row_tokens * 15 // 16 - sum(lengths)) > 16:
        drawn = rng.lognormal(np.log(row_tokens / 4) - sigma**2 / 2, sigma)
        lengths.append(int(min(max(drawn, 16), row_tokens, left)))
    return lengths


def measure(hf: Path, mesh: Mesh, name: str, row_tokens: int, **parallel: Any) -> dict[str, Any]:
    """Make a policy and update it four times; return its figures. The time is that of the last three updates."""
    policy = make_policy(hf, mesh, micro_batch_tokens=row_tokens, **parallel)
    lengths = lengths_of(row_tokens)
    batch = batch_of(lengths, row_tokens, policy.hf["vocab_size"])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(lambda: policy.update(batch.ranks[0], OBJECTIVE, batch.token_count)) for _ in range(4)]
    seconds, shape = float(np.median(times[1:])), Shape.of(policy.hf)
    cost = SequenceCost.of_decoder(shape.multiplied_weights, shape.attention_width)
    flops = 3 * sum(cost.linear * length + cost.quadratic * length**2 for length in lengths)
    card = hardware_of(torch.cuda.get_device_name()) if cuda else None
    return {
        f"{name}: update": figure(seconds, "s"),
        f"{name}: tokens per second": figure(sum(lengths) / seconds),
        f"{name}: MFU": figure(flops / seconds / card.bf16_flops.value if card else 0.0, "share"),
        f"{name}: peak memory": figure(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0, "GiB"),
    }


def in_own_process(size: str, recompute: str, head: str, again: bool) -> dict[str, Any]:
    """Measure one row in a new process, so that no earlier row affects it."""
    command = [sys.executable, __file__, "--row", size, recompute, head, *(["--again"] if again else [])]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two rows of a tiny model, on a CPU too")
    parser.add_argument("--row", nargs=3, metavar=("MODEL", "RECOMPUTE", "HEAD"), help="measure this row, print JSON")
    parser.add_argument("--again", action="store_true", help="name the row's figures as those of a repetition")
    given = parser.parse_args()
    if given.row is None:
        rows = [("tiny", *variant) for variant in VARIANTS[1:3]] if given.tiny else ROWS
        figures: dict[str, Any] = {}
        for number, row in enumerate([*rows, rows[0]]):
            figures |= in_own_process(*row, again=number == len(rows))
        write_result("throughput", figures, {"row_tokens": ROW_TOKENS, "layers": "own", "a process per row": True})
        return
    size, recompute, head = given.row
    name = f"{size}, recompute {recompute}, head {head}{', again' if given.again else ''}"
    mesh = one_rank()
    with tempfile.TemporaryDirectory() as folder:
        hf = random_qwen2(size, Path(folder))
        tokens = 256 if size == "tiny" else ROW_TOKENS
        figures = measure(hf, mesh, name, tokens, recompute=recompute, head=head)
    stop_process_group()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
