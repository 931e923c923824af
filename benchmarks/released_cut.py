"""Compare `loss.aggregation: released-code` with the released code's own functions, from a clone of its repository.

    git clone https://github.com/SkyworkAI/Skywork-OR1 && git -C Skywork-OR1 checkout 64e96af
    python benchmarks/released_cut.py Skywork-OR1

For lengths drawn at random (log-normal, cut at T; prompts of 200 tokens) it prints how many of the released
micro-batches are ours too, and how far weights are from the released ones: the root of sum_t (w_t - w'_t)^2 over
sum_t w'_t^2. "rows" are weights by the rows that one rank of 32 would compute at once, as this project once had them.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from or1_megatron.rl.aggregation import GPUS, released_cut
from or1_megatron.rl.packing import BatchLayout, plan_rows

PROMPT: Final = 200
SETTINGS: Final = ((8192, 5500, 0.7), (16384, 8000, 0.7), (32768, 10000, 0.8))
"""T, median length, spread of its logarithm."""


def released_functions(clone: Path) -> dict[str, Any]:
    """Return what verl/utils/seqlen_balancing.py defines between its imports and what needs tensors."""
    text = (clone / "verl/utils/seqlen_balancing.py").read_text()
    functions = re.search(r"^def karmarkar_karp.*?(?=^def log_seqlen_unbalance)", text, re.S | re.M)
    assert functions is not None, "another version of the file"
    names: dict[str, Any] = {}
    exec("import copy, heapq\nfrom typing import *\n" + functions[0], names)
    return names


def theirs(balance: Any, lengths: NDArray[np.int64], budget: int) -> list[list[int]]:
    """Cut as its trainer and actor do: over the GPUs, then each GPU's share into the fullest one's number of parts."""
    shares = balance(lengths.tolist(), GPUS, True)
    parts = max(-(-int(lengths[share].sum()) // budget) for share in shares)
    cut = [[[share[i] for i in part] for part in balance(lengths[share].tolist(), parts, False)] for share in shares]
    return [part for of_gpu in cut for part in of_gpu]


def weights(cut: list[list[int]], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    found = np.zeros(len(tokens))
    for part in cut:
        found[part] = len(part) * tokens.sum() / (len(tokens) * tokens[part].sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    balance = released_functions(parser.parse_args().clone)["get_seqlen_balanced_partitions"]
    rng = np.random.default_rng(0)
    print("T, micro-batches, of them the same | distance: ours, token mean, rows")
    for most, median, spread in SETTINGS:
        tokens = np.minimum(most, rng.lognormal(np.log(median), spread, 4096).astype(np.int64))
        lengths, budget = tokens + PROMPT, most + 3048
        released = theirs(balance, lengths, budget)
        ours = released_cut(lengths, budget)
        plan = plan_rows(lengths, BatchLayout(GPUS, budget, 1))
        rows = [list(row) for rank in plan.ranks for row in rank if row]
        same = len({tuple(sorted(part)) for part in released} & {tuple(sorted(part)) for part in ours})
        expected = weights(released, tokens)
        distances = [
            np.sqrt((tokens * (found - expected) ** 2).sum() / (tokens * expected**2).sum())
            for found in (weights(ours, tokens), np.ones(len(tokens)), weights(rows, tokens))
        ]
        print(f"{most}, {len(released)}, {same} | " + ", ".join(f"{distance:.3f}" for distance in distances))


if __name__ == "__main__":
    main()
