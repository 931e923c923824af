"""Measures what ``track.timeline`` costs a step of the quickstart, in pairs of neighbouring steps of one run.

    python lab/benchmarks/timeline.py --pairs 30

In one step of each pair, drawn at random, no process keeps its spans, as without a timeline. In the other step all
processes record and write each span 20 times, because the noise of steps would hide the cost of a single span; the
figures are a 20th of the difference. All steps do the same work: they have the same prompts and seeds, and a learning
rate that changes no weight. CPU seconds are those of all processes of the run. The interval of the mean difference, as
a share of a step, is at 95%.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from result import ROOT, figure, write_result

AT_MOST = 0.005
TIMES = 20  # that a span is recorded
SETS = (
    "run.stage=1", "optimizer.lr=1e-12", "evaluate.every_steps=100000", "checkpoint.every_steps=100000",
    "track.timeline=true", "track.console=plain", "run.dir=runs/timeline_cost",
    "data.train=[{path: runs/timeline_data/train.jsonl}]",
)  # fmt: skip
HOOK = """
import json, mmap, os, random, sys, time
from pathlib import Path

if folder := os.environ.get("TIMELINE_COST"):
    from or1_megatron.runtime import timeline

    flag = mmap.mmap(os.open(f"{folder}/flag", os.O_RDWR), 1)
    rows, original, drawn = [], timeline.add, random.Random(1)

    def cpu_s():
        ticks = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"TIMELINE_COST={folder}".encode() in (process / "environ").read_bytes():
                    ticks += sum(map(int, (process / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
            except OSError:
                pass
        return ticks / os.sysconf("SC_CLK_TCK")

    def repeat_the_first_step():
        stream = sys.modules["or1_megatron.data.stream"].MixtureStream
        order, sys.modules["or1_megatron.rl.supply"].derive_seed = stream._permutation, lambda *purpose: 1
        stream._permutation = lambda self, epoch: order(self, 0)

    def add(name, start_ns, end_ns, /, **args):
        if name == "step" and not rows:
            repeat_the_first_step()
        for _ in range(flag[0] * TIMES):
            original(name, start_ns, end_ns, **args)
        if name == "step":  # rank 0's
            rows.append((args["step"], flag[0], (end_ns - start_ns) / 1e9, cpu_s()))
            with open(f"{folder}/rows", "a") as file:
                print(json.dumps(rows[-1]), file=file)
            flag[0] = 1 - flag[0] if args["step"] % 2 else drawn.randrange(2)

    timeline.add = add
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    shutil.rmtree(ROOT / "runs" / "timeline_cost", ignore_errors=True)
    task = "examples/quickstart/task.py --out runs/timeline_data --train 128 --held-out 256 --seed 1"  # 128: D_R
    subprocess.run([sys.executable, *task.split()], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HOOK.replace("TIMES", str(TIMES)))
        Path(folder, "flag").write_bytes(b"\1")
        command = [sys.executable, "-m", "or1_megatron.commands.app", "train", "examples/quickstart/quickstart.yaml"]
        for key in (*SETS, f"stages.0.steps={2 * pairs + 4}"):
            command += ["--set", key]
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TIMELINE_COST": folder}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "rows").read_text().splitlines()]
    taken = {step: (on, wall_s, cpu_s - before[3]) for before, (step, on, wall_s, cpu_s) in itertools.pairwise(rows)}
    figures = {}
    for place, name in ((1, "wall"), (2, "CPU")):
        both = [sorted((taken[step], taken[step + 1])) for step in range(3, 2 * pairs + 2, 2)]  # off, then on
        usual = statistics.median(each[place] for pair in both for each in pair)
        shares = [(on[place] - off[place]) / usual / TIMES for off, on in both]
        mean, error = statistics.fmean(shares), 1.96 * statistics.stdev(shares) / math.sqrt(len(shares))
        figures |= {
            f"{name} seconds of a step, median": figure(usual, "s"),
            f"{name}: cost, mean": figure(mean, "share", at_most=AT_MOST),
            f"{name}: cost, lower bound": figure(mean - error, "share"),
            f"{name}: cost, upper bound": figure(mean + error, "share", at_most=AT_MOST),
            f"{name}: cost, median": figure(statistics.median(shares), "share"),
        }
    write_result("timeline", figures, {"pairs": len(shares), "times": TIMES, "overrides": SETS})
    for name, each in figures.items():
        print(f"{name}: {each['value']:.4g} {each['unit']}" + ("" if each.get("met", True) else "  MISSED"))


if __name__ == "__main__":
    main()
