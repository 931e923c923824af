"""Calibrates the plan on runs of the quickstart on this machine, and predicts five other runs.

    python benchmarks/plan_on_cpu.py --folder runs/plan_on_cpu

Run it on a machine that does nothing else: it measures seconds. Each run's folder is kept, and a run that is complete
is not repeated, so the program can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from host_memory import RECIPE, ROOT, quick, random_model

from or1_megatron.config.hardware import read_hardware
from or1_megatron.plan.calibrate import calibrate, predicted, read_run

STEPS: Final = 8
FITTED: Final = {"quickstart": [], "quickstart_one_engine": ["rollout.engines=1"]}
PREDICTED: Final = {
    "longer": ["stages.0.max_response_tokens=96"],
    "one_rank": ["parallel.ranks=1", "parallel.pipeline=1"],
    "tensor_parallel": ["parallel.pipeline=1", "parallel.tensor=2", "parallel.sequence=true"],
    "more_responses": ["stages.0.prompts_per_step=128", "stages.0.prompts_per_update=128"],
    "larger_model": [],
}


def run(folder: Path, name: str, overrides: list[str]) -> Path:
    """Train ``STEPS`` steps into ``folder``/name unless that is done; return the run folder."""
    where = folder / name
    made = where / "run" / "stage_1"  # ``quick`` trains the first stage alone
    if not (made / "summary.json").is_file():
        where.mkdir(parents=True, exist_ok=True)
        settings = [*quick(where, STEPS), *overrides]
        if name == "larger_model":
            settings.append(f"model.hf={random_model(where / 'model', '0.1B')}")
        command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(RECIPE)]
        subprocess.run([*command, *(part for each in settings for part in ("--set", each))], cwd=ROOT, check=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are kept")
    folder = parser.parse_args().folder
    found = calibrate([read_run(run(folder, name, keys)) for name, keys in FITTED.items()], read_hardware("cpu"))
    print(f"{found.free_parameters} free parameters, {len(found.rows)} figures\n")
    print("| run | verb | measured, s | plan, s | error |\n|---|---|---|---|---|")
    for row in found.rows:
        print(f"| {row.run}, fitted | {row.verb} | {row.measured_s:.3f} | {row.plan_s:.3f} | {row.error:+.0%} |")
    errors = {}
    for name, keys in PREDICTED.items():
        measured = read_run(run(folder, name, keys))
        plan = predicted(measured, found.hardware)
        took, expected = sum(measured.seconds.values()), sum(plan.values())
        for verb, spent in measured.seconds.items():
            print(f"| {name} | {verb} | {spent:.3f} | {plan[verb]:.3f} | {plan[verb] / spent - 1:+.0%} |")
        print(f"| {name} | in all | {took:.3f} | {expected:.3f} | {expected / took - 1:+.0%} |")
        errors[name] = expected / took - 1
    (folder / "errors.json").write_text(json.dumps(errors, indent=2) + "\n")


if __name__ == "__main__":
    main()
