"""Writes sums in words as training and held-out data; no pair of numbers is in both.

    python examples/real_model/task.py --out runs/real_model/data

Each prompt has a system message and one solved problem before it: without that the model, which is small, hardly ever
uses the box that a reward asks for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

LARGEST = 20
"""Numbers are from 1 to this: 400 pairs."""
HELD_OUT_PAIRS = 80
SYSTEM = "Solve the problem. Give the final number in \\boxed{}."
SOLVED = ("What is 5 + 4?", "5 + 4 = \\boxed{9}")
WORDINGS = ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "Compute {a} + {b}.")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Tom")
THINGS = ("apples", "books", "coins", "pencils", "shells", "stamps")


def row(pair: tuple[int, int], wording: str, chance: random.Random) -> dict[str, Any]:
    """Return one problem as a row of a data file."""
    a, b = pair
    question = wording.format(a=a, b=b, name=chance.choice(NAMES), things=chance.choice(THINGS))
    turns = [("system", SYSTEM), ("user", SOLVED[0]), ("assistant", SOLVED[1]), ("user", question)]
    return {
        "data_source": "sums",
        "prompt": [{"role": role, "content": text} for role, text in turns],
        "ability": "math",
        "reward_model": {"ground_truth": json.dumps([str(a + b)]), "style": "rule"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of train.jsonl and heldout.jsonl")
    folder = parser.parse_args().out
    chance = random.Random(1)
    pairs = list(itertools.product(range(1, LARGEST + 1), repeat=2))
    chance.shuffle(pairs)
    files = {"heldout.jsonl": pairs[:HELD_OUT_PAIRS], "train.jsonl": pairs[HELD_OUT_PAIRS:]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, of in files.items():
        rows = [row(pair, wording, chance) for pair in of for wording in WORDINGS]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
