"""Measures what new code costs a step: runs a short quickstart of this tree and of another commit's checkout in turn.

    git worktree add /tmp/before 5887e70
    python lab/benchmarks/paired_commits.py --before /tmp/before --pairs 5

Each runs in its checkout's ``.venv`` if there is one, else in this environment, so that versions of libraries can be
compared as well. The two runs of a pair have the same seed, and every other pair begins with this tree. A run's figure
is the mean of ``time/step`` over all steps except the first; ``start`` is the rest of the process's wall time. The
upper bound is that of the geometric mean of the ratios at 95% (Student's t, one-sided).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from result import ROOT, figure, write_result

SETS = ["stages.0.steps=6", "stages.1.steps=6", "evaluate.every_steps=100", "track.console=plain"]
AT_MOST = 1.05
STUDENT_95 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}
"""The 95% point of Student's t by the number of pairs; degrees of freedom are the number of pairs minus 1."""


def python_of(tree: Path) -> str:
    own = tree / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def run(tree: Path, seed: int) -> tuple[float, float]:
    """Run a short quickstart; return (mean seconds of a step, ``start``)."""
    folder = ROOT / "runs" / "paired_commits"
    shutil.rmtree(folder, ignore_errors=True)
    sets = [*SETS, f"run.seed={seed}", f"run.dir={folder}"]
    command = [python_of(tree), "-m", "or1_megatron.commands.app", "train", "examples/quickstart/quickstart.yaml"]
    command += [part for key in sets for part in ("--set", key)]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=False, capture_output=True, text=True
    )
    wall_s = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{tree}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["time/step"] for row in rows if "time/step" in row]
    return statistics.fmean(steps[1:]), wall_s - math.fsum(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--pairs", type=int, default=5, choices=STUDENT_95)
    arguments = parser.parse_args()
    before = arguments.before.resolve()
    for tree in {before, ROOT}:
        task = [python_of(tree), "examples/quickstart/task.py", "--out", "runs/quickstart_data"]
        subprocess.run([*task, "--train", "4096", "--held-out", "256", "--seed", "1"], check=True, cwd=tree)
    found: dict[Path, list[tuple[float, float]]] = {before: [], ROOT: []}
    for pair in range(arguments.pairs):
        for tree in (before, ROOT) if pair % 2 else (ROOT, before):
            found[tree].append(run(tree, pair + 1))
            print(f"pair {pair + 1}, {tree.name}: a step {found[tree][-1][0]:.3f} s", flush=True)
    ratios = [new[0] / old[0] for new, old in zip(found[ROOT], found[before], strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=before, capture_output=True, text=True)
    figures = {
        "a step, this tree / the other": figure(math.exp(statistics.fmean(logs)), "ratio"),
        "its upper bound (95%)": figure(
            math.exp(statistics.fmean(logs) + STUDENT_95[len(logs)] * error), "ratio", at_most=AT_MOST
        ),
        "a step, this tree, median": figure(statistics.median(step for step, _ in found[ROOT]), "s"),
        "start and end, this tree, median": figure(statistics.median(rest for _, rest in found[ROOT]), "s"),
        "start and end, the other, median": figure(statistics.median(rest for _, rest in found[before]), "s"),
    }
    settings = {"other commit": commit.stdout.strip(), "overrides": SETS, "ratios": [round(each, 4) for each in ratios]}
    write_result("paired_commits", figures, settings)
    for name, each in figures.items():
        print(f"{name}: {each['value']:.4g} {each['unit']}" + ("" if each.get("met", True) else "  MISSED"))


if __name__ == "__main__":
    main()
