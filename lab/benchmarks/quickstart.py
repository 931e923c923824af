"""Measures the quickstart over several seeds: accuracy, entropy, wall time, the share of "other" time.

    python lab/benchmarks/quickstart.py --seeds 1 2 3

Each seed is a whole run of examples/quickstart/run.sh in runs/quickstart_seed_N; finished ones are read, not run again.
Prints a Markdown table and writes lab/results/quickstart.json; a run read from disk may be of an older commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from typing import Any

import yaml
from result import ROOT, figure, write_result

UNITS = {
    "accuracy_before": "share",
    "accuracy_after": "share",
    "truncated_first_step": "share",
    "entropy_over_target": "",
    "other_share": "share",
    "other_share_median_step": "share",
    "other_share_worst_step": "share",
    "worst_breakdown_gap": "share",
    "steps": "",
    "wall_s": "s",
    "command_wall_s": "s",
}


def run(seed: int) -> dict[str, Any]:
    """Return the figures of the run with one seed. Train first, unless the run is finished."""
    folder = ROOT / "runs" / f"quickstart_seed_{seed}"
    wall = folder / "benchmark_wall_s.txt"
    if not wall.is_file():
        started_s = time.monotonic()
        command = ["examples/quickstart/run.sh", "--set", f"run.seed={seed}", "--set", f"run.dir={folder}"]
        subprocess.run([*command, "--set", "track.console=plain"], cwd=ROOT, check=True)
        wall.write_text(f"{time.monotonic() - started_s:.1f}")
    summary = json.loads((folder / "summary.json").read_text())
    target = yaml.safe_load((folder / "config.yaml").read_text())["algorithm"]["entropy"]["target"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "entropy/sampled" in row]
    late = [row["entropy/sampled"] for row in steps[len(steps) // 2 :]]
    gaps = [abs(sum_of_verbs(row) / row["time/step"] - 1) for row in steps]
    return {
        "seed": seed,
        "command_wall_s": float(wall.read_text()),
        **{key: summary[key] for key in ("accuracy_before", "accuracy_after", "other_share", "steps", "wall_s")},
        "entropy_over_target": sum(late) / len(late) / target,
        "truncated_first_step": steps[0]["truncation/ratio"],
        "worst_breakdown_gap": max(gaps),
        "other_share_median_step": statistics.median(row["other_share"] for row in steps),
        "other_share_worst_step": max(row["other_share"] for row in steps),
    }


def sum_of_verbs(row: dict[str, float]) -> float:
    return sum(v for k, v in row.items() if k.startswith("time/") and k not in ("time/step", "time/other"))


def figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return every figure of every seed, by names such as "seed 1: accuracy after"."""
    return {
        f"seed {r['seed']}: {key.removesuffix('_s').replace('_', ' ')}": figure(r[key], unit)
        for r in results
        for key, unit in UNITS.items()
    }


def table(results: list[dict[str, Any]]) -> str:
    headings = (
        *("seed", "accuracy before", "after", "truncated at first", "entropy / target, 2nd half"),
        *("other: run", "median step", "worst step", "worst breakdown gap", "steps", "whole command"),
    )
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for r in results:
        lines.append(
            f"| {r['seed']} | {r['accuracy_before']:.1%} | {r['accuracy_after']:.1%} | {r['truncated_first_step']:.1%} "
            f"| {r['entropy_over_target']:.2f} | {r['other_share']:.1%} | {r['other_share_median_step']:.1%} | "
            f"{r['other_share_worst_step']:.1%} | {r['worst_breakdown_gap']:.2%} "
            f"| {r['steps']} | {r['command_wall_s']:.0f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    results = [run(seed) for seed in parser.parse_args().seeds]
    write_result("quickstart", figures(results), {"seeds": [r["seed"] for r in results]})
    print(table(results))


if __name__ == "__main__":
    main()
