"""The quickstart's task in this trainer and in TRL's GRPOTrainer, by turns: seconds of a step, seconds to an accuracy.

    python lab/benchmarks/peers.py --rounds 2

Same model, prompts, D_R, group size, T, learning rate, optimizer and cores; once with the T of the quickstart's first
stage and once with that of its second. This trainer runs as the quickstart does (two ranks, two engines, adaptive
entropy, checkpoints), but with one stage and an evaluation after every step, at T 96. TRL is installed into
runs/peers/env, with this environment's versions of torch and transformers, and generates with transformers; of
``TRL_WAYS`` it runs in the one whose steps were fastest in a run of ``TRIED_STEPS``. Evaluations count on neither side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import yaml
from result import ROOT, figure, write_result

TRL: Final = "1.16.0"
FOLDER: Final = ROOT / "runs" / "peers"
TRL_WAYS: Final = ((1, 256), (1, 512), (2, 256), (2, 512))
"""(processes, responses of a forward and backward pass)."""
TRIED_STEPS: Final = 3
TOKENS: Final = (56, 96)
ACCURACIES: Final = (0.75, 0.85, 0.95)
AIM: Final = 2.5
STAGE: Final = {
    "name": "only",
    "prompts_per_step": 128,
    "prompts_per_update": 128,
    "group_size": 8,
}


def trl_python() -> Path:
    """Install TRL unless that is done; return its environment's Python."""
    python = FOLDER / "env" / "bin" / "python"
    stamp = FOLDER / "env" / "installed"
    if not stamp.is_file():
        shutil.rmtree(FOLDER / "env", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", FOLDER / "env"], check=True)
        pins = [f"torch=={version('torch').split('+')[0]}", f"transformers=={version('transformers')}", f"trl=={TRL}"]
        subprocess.run([python, "-m", "pip", "install", "-q", *pins, f"numpy=={version('numpy')}"], check=True)
        stamp.touch()
    return python


def trl(seed: int, steps: int, tokens: int, way: tuple[int, int]) -> dict[str, Any]:
    """Train with TRL; return what peer_trl.py says."""
    processes, micro_batch = way
    out = FOLDER / f"trl_{tokens}_{seed}.json"
    command = [trl_python(), ROOT / "lab" / "benchmarks" / "peer_trl.py"]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [f"--out={out}", f"--seed={seed}", f"--steps={steps}", f"--tokens={tokens}"]
    command += [f"--micro-batch={micro_batch}"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"})
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def seconds_of_a_step(run: dict[str, Any]) -> float:
    """Return the median without the first step, which warms up."""
    return float(statistics.median(run["step_s"][1:]))


def ours(seed: int, steps: int, tokens: int) -> dict[str, Any]:
    """Train as the quickstart does; return the same figures."""
    folder = FOLDER / f"ours_{tokens}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    config = FOLDER / "ours.yaml"
    quickstart = ROOT / "examples" / "quickstart" / "quickstart.yaml"
    changed = {"base": str(quickstart), "stages": [{**STAGE, "steps": steps, "max_response_tokens": tokens}]}
    config.write_text(yaml.safe_dump(changed))
    sets = [f"run.seed={seed}", f"run.dir={folder}", "evaluate.every_steps=1", "evaluate.samples_during=2"]
    command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(config), "--set", "track.console=plain"]
    began_s = time.monotonic()
    subprocess.run([*command, *(part for key in sets for part in ("--set", key))], check=True, cwd=ROOT)
    wall_s = time.monotonic() - began_s
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step_s = [row["time/step"] - row.get("time/evaluate", 0.0) for row in rows if row["step"]]
    return {
        "start_s": wall_s - sum(row["time/step"] for row in rows if row["step"]),
        "step_s": step_s,
        "accuracy": [row["evaluation/accuracy"] for row in rows if row["step"]],
    }


def seconds_to(run: dict[str, Any], accuracy: float) -> float | None:
    """Return the seconds of steps until an evaluation reached ``accuracy``; None if none did."""
    spent = 0.0
    for step_s, reached in zip(run["step_s"], run["accuracy"], strict=True):
        spent += step_s
        if reached >= accuracy:
            return spent
    return None


def figures_of(runs: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, dict[str, Any]]:
    """Return the figures of the runs of both at one T."""
    figures = {}
    for name, found in runs.items():
        figures[f"T {tokens}, {name}: a step"] = figure(statistics.median(map(seconds_of_a_step, found)), "s")
        figures[f"T {tokens}, {name}: start"] = figure(statistics.median(run["start_s"] for run in found), "s")
        for accuracy in ACCURACIES:
            reached = [seconds for run in found if (seconds := seconds_to(run, accuracy)) is not None]
            label = f"T {tokens}, {name}: to an accuracy of {accuracy:.0%}, {len(reached)} of {len(found)} seeds"
            if reached:
                figures[label] = figure(statistics.median(reached), "s")
    label = f"T {tokens}: a step, TRL / ours, median of the pairs"
    figures[label] = figure(statistics.median(ratios_of(runs)), "ratio", at_least=AIM)
    return figures


def ratios_of(runs: dict[str, list[dict[str, Any]]]) -> list[float]:
    """Return TRL's seconds of a step over ours, seed by seed."""
    return [
        seconds_of_a_step(peer) / seconds_of_a_step(own) for own, peer in zip(runs["ours"], runs["TRL"], strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    task = [sys.executable, "examples/quickstart/task.py", "--out", "runs/quickstart_data"]
    subprocess.run([*task, "--train", "4096", "--held-out", "256", "--seed", "1"], check=True, cwd=ROOT)
    tried = {way: seconds_of_a_step(trl(1, TRIED_STEPS, TOKENS[0], way)) for way in TRL_WAYS}
    way = min(tried, key=tried.__getitem__)
    settings: dict[str, Any] = {
        "TRL": TRL, "processes, micro-batch": way, "steps": arguments.steps,
        "tried": {str(each): round(seconds, 2) for each, seconds in tried.items()},
    }  # fmt: skip
    figures = {}
    for tokens in TOKENS:
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "TRL": []}
        for seed in range(1, arguments.rounds + 1):
            for name in ("ours", "TRL") if seed % 2 else ("TRL", "ours"):
                steps = arguments.steps
                runs[name].append(ours(seed, steps, tokens) if name == "ours" else trl(seed, steps, tokens, way))
        figures |= figures_of(runs, tokens)
        settings[f"T {tokens}: ratios"] = [round(ratio, 2) for ratio in ratios_of(runs)]
        settings[f"T {tokens}: accuracy"] = {
            name: [[round(a, 3) for a in run["accuracy"]] for run in found] for name, found in runs.items()
        }
    write_result("peers", figures, settings)
    for name, each in figures.items():
        print(f"{name}: {each['value']:.3g} {each['unit']}")


if __name__ == "__main__":
    main()
