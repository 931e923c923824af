"""What the guards against silent damage and lost steps cost a step: comparison of replicas, checksums of
messages, checkpoints in memory.

    python benchmarks/guards.py                            # the quickstart's model
    python benchmarks/guards.py --sizes quickstart 0.1B    # and a random one, which takes a quarter of an hour

Each run is a short quickstart with two data-parallel ranks, whose state goes to the host between updates
(parallel.offload=always). The ranks add up the time that they spend inside these functions, those before the first
step included; the share is the slower rank's, of the sum of the steps' times. A comparison includes the wait for the
other rank. The loop waits for the copy of the state that a checkpoint in memory is made of. What its writing costs
beside the loop is the ratio of the steps' times with and without checkpoints in memory; it is measured by turns.
Writes benchmarks/results/guards.json.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host_memory import quick, random_model
from result import ROOT, figure, write_result

STEPS = 6
AT_MOST = 0.01
SETS = ["parallel.pipeline=1", "parallel.offload=always", f"checkpoint.every_steps={10 * STEPS}"]
FUNCTIONS = {  # module, its function, what it does
    "comparison of replicas": ("or1_megatron.parallel.replicas", "check_replicas"),
    "its sums alone": ("or1_megatron.parallel.replicas", "bit_sums"),
    "checksums of messages": ("or1_megatron.runtime.message", "checksum"),
    "copy for a checkpoint in memory": ("or1_megatron.parallel.saver", "CheckpointSaver.save"),
}
FOLDER = "OR1_GUARDS"


def rank() -> int:
    """Run a rank of the trainer that adds up the seconds inside each function."""
    import importlib

    spent: dict[str, float] = dict.fromkeys(FUNCTIONS, 0.0)
    for name, (module, path) in FUNCTIONS.items():
        owner: Any = importlib.import_module(module)
        *outer, function = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, function, timed(getattr(owner, function), spent, name))
    file = Path(os.environ[FOLDER], f"rank_{os.environ['RANK']}.json")
    atexit.register(lambda: file.write_text(json.dumps(spent)))
    from or1_megatron.trainer.run import main

    return main()


def timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[name] += time.perf_counter() - began_s

    return call


def run(scratch: Path, size: str, in_memory: bool) -> tuple[float, dict[str, float]]:
    """Train some steps; return the mean seconds of a step, and of it in each function on the slower rank."""
    sets = [*quick(scratch, STEPS), *SETS, f"checkpoint.in_memory={str(in_memory).lower()}"]
    if size != "quickstart":
        sets.append(f"model.hf={random_model(scratch / 'model', size)}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    command += ["--rank", "examples/quickstart/quickstart.yaml", *(part for key in sets for part in ("--set", key))]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, FOLDER: str(scratch), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (scratch / "run" / "stage_1" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["time/step"] for row in rows if "time/step" in row]
    ranks = [json.loads((scratch / f"rank_{index}.json").read_text()) for index in range(2)]
    return statistics.fmean(steps), {name: max(each[name] for each in ranks) / len(steps) for name in FUNCTIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["quickstart"], choices=["quickstart", "0.1B", "0.5B"])
    parser.add_argument("--turns", type=int, default=2, help="runs with and without checkpoints in memory")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for size in arguments.sizes:
        found: dict[bool, list[tuple[float, dict[str, float]]]] = {True: [], False: []}
        for turn in range(2 * arguments.turns):
            in_memory = turn % 4 in (0, 3)
            with tempfile.TemporaryDirectory(prefix="or1_guards_") as folder:
                found[in_memory].append(run(Path(folder), size, in_memory))
            step_s, spent = found[in_memory][-1]
            shares = ", ".join(f"{name} {took / step_s:.2%}" for name, took in spent.items())
            print(f"{size}, in memory {in_memory}: a step {step_s:.2f} s; {shares}", flush=True)
        step_s = statistics.fmean(each[0] for each in found[True])
        without_s = statistics.fmean(each[0] for each in found[False])
        figures[f"{size}: a step"] = figure(step_s, "s")
        for name in FUNCTIONS:
            shares_of = [spent[name] / took for took, spent in found[True]]
            at_most = None if "copy" in name else AT_MOST
            figures[f"{size}: {name}"] = figure(statistics.fmean(shares_of), "of a step", at_most=at_most)
        figures[f"{size}: a step, with checkpoints in memory / without"] = figure(step_s / without_s, "ratio")
    write_result("guards", figures, {"steps": STEPS, "turns": arguments.turns, "overrides": SETS})
    for name, each in figures.items():
        print(f"{name}: {each['value']:.4f} {each['unit']}" + ("" if each.get("met", True) else "  MISSED"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        del sys.argv[1]
        sys.exit(rank())
    main()
