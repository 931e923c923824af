"""Draws the held-out accuracy of runs over their steps.

python examples/real_model/figure.py runs/real_model/seed_1 runs/real_model/seed_2 --out accuracy.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for run in arguments.runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        points = [(row["step"], 100 * row["evaluation/accuracy"]) for row in rows if "evaluation/accuracy" in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=run.name)
    axes.set(xlabel="step", ylabel="held-out accuracy, %", ylim=(0, 100))
    axes.legend(frameon=False)
    figure.savefig(arguments.out)


if __name__ == "__main__":
    main()
