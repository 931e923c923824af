"""Pace and memory of the pipeline's steps that need neither a model, a verifier nor the sandbox.

    python benchmarks/data_pipeline.py --scratch FOLDER [--rows 1000000]

Synthetic rows with NuminaMath-1.5's columns: the example's kinds of problems in stories of random words, a tenth of
them exact and a tenth near-duplicates. Every step is one `or1 data build --until STEP` in a process of its own, on one
thread, the steps before it cached. Pace is rows per second of that process's CPU time (user and system), so that other
work on the machine matters little; memory is its peak resident set. FOLDER takes about 2 GB for a million rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from result import ROOT, figure, write_result

sys.path.insert(0, str(ROOT / "examples" / "data"))
from exam_problems import EXAM
from math_problems import KINDS

STEPS = ("normalise", "statements", "exact_duplicates", "near_duplicates", "decontaminate")
GIB = 1 << 30


def write_rows(path: Path, rows: int) -> None:
    rng = random.Random(1)
    letters = "aeiou", "bcdfghklmnprstvw"
    vocabulary = ["".join(rng.choice(letters[n % 2]) for n in range(rng.randint(3, 9))) for _ in range(5000)]
    pool: list[str] = []
    with path.open("w") as file:
        for _ in range(rows):
            problem = rng.choice(KINDS)(rng)
            story = " ".join(rng.choices(vocabulary, k=rng.randint(8, 40)))
            statement = f"{story.capitalize()}. {problem.statement}"
            draw = rng.random()
            if pool and draw < 0.1:
                statement = f"{rng.randint(1, 99)}. {rng.choice(pool)}"
            elif pool and draw < 0.2:
                statement = f"{rng.choice(pool)} Express your answer in simplest form, and keep it short."
            elif len(pool) < 20_000:
                pool.append(statement)
            row = {
                "problem": statement,
                "solution": problem.solution,
                "answer": problem.answer,
                "question_type": "math-word-problem",
                "source": "olympiads",
            }
            file.write(json.dumps(row) + "\n")


def run_until(step: str, recipe: Path) -> tuple[float, int]:
    """(CPU seconds, peak resident bytes) of the build up to a step."""
    command = [sys.executable, "-m", "or1_megatron.commands.app", "data", "build", str(recipe), "--until", step]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ARROW_IO_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    folder = arguments.scratch / f"data_pipeline_{arguments.rows}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "rows.jsonl").is_file():
        write_rows(folder / "rows.partial", arguments.rows)
        (folder / "rows.partial").rename(folder / "rows.jsonl")
    exam = [{"problem": problem.statement, "answer": problem.answer} for problem in EXAM]
    (folder / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in exam))
    recipe = folder / "recipe.yaml"
    settings = {
        "out": str(folder / f"build-{time.time_ns()}"),
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "answers": None,
        "code": None,
        "decontaminate": {"against": [{"path": str(folder / "exam.jsonl")}]},
    }
    recipe.write_text(json.dumps(settings))
    figures = {}
    for step in STEPS:
        cpu_s, peak = run_until(step, recipe)
        again_s, _ = run_until(step, recipe)  # all cached: starting, and reading what is there
        state = json.loads((Path(settings["out"]) / "build.json").read_text())
        rows = state["steps"][-1]["rows_in"]
        pace = rows / max(cpu_s - again_s, 1e-9)
        print(f"{step}: {rows} rows, {pace:.0f} rows/s/core, {peak / GIB:.2f} GiB", flush=True)
        figures[f"{step}: rows"] = figure(rows)
        figures[f"{step}: rows per CPU second"] = figure(round(pace), at_least=5000)
        figures[f"{step}: peak memory"] = figure(round(peak / GIB, 3), "GiB", at_most=2.0)
    write_result("data_pipeline", figures, {"rows": arguments.rows, "threads": 1})


if __name__ == "__main__":
    main()
