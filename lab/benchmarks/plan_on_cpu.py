"""Measures this machine, calibrates the plan on two runs of the quickstart, and predicts five other runs.

    python lab/benchmarks/plan_on_cpu.py --folder runs/plan_on_cpu            # prints tables of each verb
    python lab/benchmarks/plan_on_cpu.py --folder runs/plan_on_cpu --write    # writes configs/hardware/cpu.yaml, too

Run it on a machine of two cores that does nothing else: it measures seconds. All runs are made by turns, ``ROUNDS``
times; a verb's time is the median over the steps, then over the rounds. Each run's folder is kept, and a run that is
complete is not repeated, so the program can be stopped and started again. Writes lab/results/plan_on_cpu.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from host_memory import QUICKSTART, RECIPE, ROOT, quick
from result import figure, write_result

from or1_megatron.config.hardware import Constant, hardware_yaml, read_hardware
from or1_megatron.config.recipes import named
from or1_megatron.plan.calibrate import MeasuredRun, calibrate, predicted, read_run

STEPS: Final = 8
ROUNDS: Final = 3
FITTED: Final = {"quickstart": [], "quickstart_one_engine": ["rollout.engines=1"]}
PREDICTED: Final = {
    "longer": ["stages.0.max_response_tokens=96"],
    "one_rank": ["parallel.ranks=1", "parallel.pipeline=1"],
    "tensor_parallel": ["parallel.pipeline=1", "parallel.tensor=2", "parallel.sequence=true"],
    "more_responses": ["stages.0.prompts_per_step=128", "stages.0.prompts_per_update=128"],
    "larger_model": [],
}
LARGER: Final = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 8,
}
"""Seven times the quickstart's parameters."""
SOURCE: Final = "measured by lab/benchmarks/plan_on_cpu.py"
LARGE_BYTES: Final = 4 << 20
"""The size of the all-reduce whose bandwidth is measured."""


def measured(folders: list[Path]) -> MeasuredRun:
    """Return a run's medians over the rounds."""
    runs = [read_run(folder) for folder in folders]
    median = {verb: statistics.median(each.seconds[verb] for each in runs) for verb in runs[0].seconds}
    return replace(runs[0], name=runs[0].name.split("/")[-3], seconds=median)


def run(where: Path, name: str, overrides: list[str]) -> Path:
    """Train ``STEPS`` steps into ``where`` unless that is done; return the run folder."""
    made = where / "run" / "stage_1"  # ``quick`` trains the first stage alone
    if not (made / "summary.json").is_file():
        where.mkdir(parents=True, exist_ok=True)
        settings = [*quick(where, STEPS), *overrides]
        if name == "larger_model":
            settings.append(f"model.hf={larger_model(where / 'model')}")
        command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(RECIPE)]
        subprocess.run([*command, *(part for each in settings for part in ("--set", each))], cwd=ROOT, check=True)
    return made


def larger_model(folder: Path) -> Path:
    """Write random weights of the quickstart's architecture, larger (``LARGER``), with its tokenizer."""
    import transformers

    if not folder.is_dir():
        shutil.copytree(
            QUICKSTART / "base_model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
        )
        config = transformers.AutoConfig.from_pretrained(QUICKSTART / "base_model", **LARGER)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def seconds(function: Callable[[], object], rounds: int = 20) -> list[float]:
    """Return the times of calls, after one that does not count."""
    function()
    spent = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        spent.append(time.perf_counter() - start)
    return spent


def measured_rates() -> dict[str, float]:
    """Return the figures of one core, and of gloo between two processes."""
    torch.set_num_threads(1)
    left, right, large = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.randn(1 << 25)
    found = mp.get_context("spawn").Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_reduce, args=(port, found), nprocs=2)
    message_s, reduce_s = found.get()
    return {
        "bf16_flops": 2 * 1024**3 / statistics.median(seconds(lambda: left @ right)),
        "memory_bytes_per_s": 2 * large.nbytes / statistics.median(seconds(lambda: large.clone())),  # reads and writes
        "message_s": message_s,
        "link_bytes_per_s": LARGE_BYTES / (reduce_s - message_s),  # a ring of two sends as many bytes as there are
    }


def _reduce(rank: int, port: int, found: mp.Queue[tuple[float, float]]) -> None:
    """Measure all-reduces after a product, as layers have them: a process that has to wait may sleep for milliseconds.
    So the times are of two kinds, and the mean counts."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    factor = torch.randn(512, 512)

    def mean_s(sent: torch.Tensor | None) -> float:
        return statistics.fmean(seconds(lambda: (factor @ factor, sent is None or dist.all_reduce(sent)), 400))

    product_s, small_s, large_s = mean_s(None), mean_s(torch.ones(256)), mean_s(torch.ones(LARGE_BYTES // 4))
    if rank == 0:
        found.put((small_s - product_s, large_s - product_s))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--write", action="store_true", help="write the constants into the hardware file")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    rates = measured_rates()
    machine = read_hardware("cpu").model_copy(
        update={name: Constant(value=float(f"{value:.2g}"), source=SOURCE) for name, value in rates.items()}
    )
    folders: dict[str, list[Path]] = {name: [] for name in FITTED | PREDICTED}
    for turn in range(ROUNDS):
        for name, keys in (FITTED | PREDICTED).items():
            folders[name].append(run(folder / str(turn) / name, name, keys))
    runs = {name: measured(found) for name, found in folders.items()}
    found = calibrate([runs[name] for name in FITTED], machine)
    print(", ".join(f"{name} {value:.2g}" for name, value in rates.items()))
    print(f"{found.free_parameters} free parameters, {len(found.rows)} figures\n")
    print("| run | verb | measured, s | plan, s | error |\n|---|---|---|---|---|")
    for row in found.rows:
        planned_s = row.measured_s * (1 + row.error)
        print(f"| {row.run}, fitted | {row.verb} | {row.measured_s:.3f} | {planned_s:.3f} | {row.error:+.0%} |")
    figures = {}
    for name in PREDICTED:
        plan = predicted(runs[name], found.hardware)
        took, expected = sum(runs[name].seconds.values()), sum(plan.values())
        for verb, spent in runs[name].seconds.items():
            print(f"| {name} | {verb} | {spent:.3f} | {plan[verb]:.3f} | {plan[verb] / spent - 1:+.0%} |")
        print(f"| {name} | in all | {took:.3f} | {expected:.3f} | {expected / took - 1:+.0%} |")
        figures[f"{name}: a step of {took:.2f} s"] = figure(abs(expected / took - 1), "share", at_most=0.15)
    write_result("plan_on_cpu", figures, {"steps": STEPS, "rounds": ROUNDS})
    if arguments.write:
        worst = max(each["value"] for each in figures.values())
        error = Constant(
            value=float(f"{worst:.2g}"), source="largest error of lab/benchmarks/plan_on_cpu.py's five runs"
        )
        named("hardware")["cpu"].write_text(hardware_yaml(found.hardware.model_copy(update={"error": error})))


if __name__ == "__main__":
    main()
