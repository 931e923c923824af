"""Measures the memory of each of a run's processes on a machine without GPUs, beside the estimate of it.

    python lab/benchmarks/host_memory.py                        # all cases
    python lab/benchmarks/host_memory.py --case quickstart      # one

Runs two steps of the quickstart's first stage, shortened, and reads the proportional set size (PSS) of every process of
the run several times a second: two, because a run without a saver's copy makes AdamW's moments at the end of the first,
when its activations are gone. The peak of each kind of process and of their sum are compared with those of
``sizing/memory.py``, whose constants were fitted to two of the cases. Each case's peaks are kept in runs/host_memory; a
case that is there is not run again. Writes lab/results/host_memory.json. The random models have a vocabulary of
151,936.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from result import figure, write_result

from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config, ParallelConfig
from or1_megatron.sizing.memory import LOOP, needed, process_memory
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
RECIPE = QUICKSTART / "quickstart.yaml"
KEPT = ROOT / "runs" / "host_memory"
IN_ALL = "in all"
STEPS = 2
RANDOM = {
    "0.1B": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


class Case(NamedTuple):
    """A run whose memory is measured."""

    overrides: Sequence[str] = ()
    random: str | None = None
    """Its model, of ``RANDOM``; None: the quickstart's."""
    fitted: bool = False
    """The constants of the estimate are fitted to it."""


ALONE = ["parallel.ranks=1", "parallel.pipeline=1", "rollout.engines=1"]
CASES = {
    "quickstart": Case(fitted=True),
    # 80 responses at a time on each engine; 160 fill three rows.
    "0.1B": Case(
        ["rollout.max_concurrent=80", "stages.0.prompts_per_step=20", "stages.0.prompts_per_update=20"],
        random="0.1B",
        fitted=True,
    ),
    "0.5B": Case(
        # What fits in 24 GB: one rank, one engine, no copies of the state. 32 responses fill one row.
        [
            *ALONE,
            "checkpoint.asynchronous=false",
            "parallel.threads_per_rank=2",
            "parallel.micro_batch_tokens=1280",
            "rollout.max_concurrent=32",
            "stages.0.prompts_per_step=4",
            "stages.0.prompts_per_update=4",
        ],
        random="0.5B",
    ),
    "TP2": Case(["parallel.pipeline=1", "parallel.tensor=2", "parallel.sequence=true"]),
    # 3,840 responses make some 18 rows; fewer rows are packed evenly, and none is full.
    "rows of 8K": Case(
        ["parallel.micro_batch_tokens=8192", "stages.0.prompts_per_step=480", "stages.0.prompts_per_update=480"]
    ),
}
ROLES = {  # the estimate's name of a process: what its command line holds; the first that fits
    "trainer rank": r"or1_megatron\.trainer\.run ",
    "engine": r"EngineActor",
    "rollout manager": r"RolloutManager",
    "verifier process": r"or1_megatron\.verify\.",
    "Ray": r"raylet|gcs_server|ray::|/ray/",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="run this one alone, and write no result")
    arguments = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    figures = {}
    print("| run | process | measured, GiB | estimated, GiB | error |\n|---|---|---|---|---|")
    for name in [arguments.case] if arguments.case else CASES:
        measured, estimated = compare(name)
        for process in [each for each in estimated if each in measured]:
            error = estimated[process] / measured[process] - 1
            print(f"| {name} | {process} | {gib(measured[process])} | {gib(estimated[process])} | {error:+.1%} |")
            run = f"{name} ({'fitted' if CASES[name].fitted else 'held out'})"
            figures[f"{run}: {process}"] = figure(measured[process] / (1 << 30), "GiB")
            figures[f"{run}, error: {process}"] = figure(abs(error), "share", at_most=0.1)
        for process in measured.keys() - estimated.keys():
            print(f"| {name} | {process} | {gib(measured[process])} | - | - |")
    if arguments.case is None:
        write_result("host_memory", figures, {"steps": STEPS})


def compare(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the peak bytes of a case's processes and of their sum by the estimate's names: measured, estimated."""
    case, kept = CASES[name], KEPT / f"{name.replace(' ', '_')}.json"
    with tempfile.TemporaryDirectory(prefix="or1_memory_") as folder:
        scratch = Path(folder)
        overrides = [*quick(scratch, steps=STEPS), *case.overrides]
        if case.random is not None:
            overrides.append(f"model.hf={random_model(scratch / 'model', case.random)}")
        config = load_config(RECIPE, overrides)
        estimate = process_memory(config, Shape.of(read_hf_config(config.model.hf)), "cpu")
        if not kept.is_file():
            kept.write_text(json.dumps(measure(overrides, config), indent=2) + "\n")
    estimated = {held.process: held.peak_bytes for held in estimate}
    loop = estimated.pop(LOOP)
    first = next(process for process in estimated if process.startswith("trainer rank"))
    estimated[first] += loop  # rank 0 is the largest of these
    estimated[IN_ALL] = needed(config, estimate, "cpu")
    return json.loads(kept.read_text()), estimated


def quick(scratch: Path, steps: int) -> list[str]:
    """Make the quickstart's data; return the overrides of a short run of it."""
    data = scratch / "data"
    make = [sys.executable, str(QUICKSTART / "task.py"), "--out", str(data)]
    subprocess.run([*make, "--train", "512", "--held-out", "16", "--seed", "1"], check=True, cwd=ROOT)
    return [
        f"run.dir={scratch / 'run'}",
        f"data.train.0.path={data / 'train.jsonl'}",
        "evaluate.data=[]",
        "evaluate.every_steps=0",
        f"stages.0.steps={steps}",
        "stages.0.max_response_tokens=24",
        "stages.0.prompts_per_step=64",  # of 8 responses each: as many as the engines decode at once
        "stages.0.prompts_per_update=64",
        "run.stage=1",
        "algorithm.advantage.reject_uniform_groups=false",  # of random weights all answers are wrong
        "cluster.check_memory=false",
        "track.console=plain",
    ]


def random_model(folder: Path, size: str) -> Path:
    """Write random weights (``RANDOM``), the output layer tied to the embedding, with the quickstart's tokenizer."""
    import transformers

    shutil.copytree(QUICKSTART / "base_model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = transformers.Qwen2Config(
        **RANDOM[size], vocab_size=151_936, max_position_embeddings=2048, tie_word_embeddings=True
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def measure(overrides: list[str], config: Config) -> dict[str, int]:
    """Run the recipe; return the peak bytes by the estimate's names, of the largest process of each (Ray's together),
    and of the sum of all processes. The run's end, from when an engine is gone, does not count: a process that is left
    has its libraries to itself."""
    command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(RECIPE)]
    run = psutil.Popen([*command, *(part for each in overrides for part in ("--set", each))], cwd=ROOT)
    peaks: dict[str, int] = collections.defaultdict(int)
    together = most = 0
    while run.poll() is None:
        held: dict[str, list[int]] = collections.defaultdict(list)
        for process in [run, *children(run)]:
            if (found := name_and_pss(process, config.parallel)) is not None:
                held[found[0]].append(found[1])
        engines, most = len(held["engine"]), max(most, len(held["engine"]))
        if engines < most:
            run.wait()
            break
        for name, sizes in held.items():
            peaks[name] = max(peaks[name], sum(sizes) if name == "Ray" else max(sizes, default=0))
        together = max(together, sum(map(sum, held.values())))
        time.sleep(0.05)
    if run.returncode:
        raise SystemExit(f"the run failed: exit code {run.returncode}")
    return peaks | {IN_ALL: together}


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def name_and_pss(process: psutil.Process, parallel: ParallelConfig) -> tuple[str, int] | None:
    """Return the process's name in the estimate, or its command line, and its bytes; None when it has just ended."""
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        command = " ".join(process.cmdline())
        rank = process.environ().get("RANK", "0")
    except (OSError, psutil.Error):
        return None
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    name = next((name for name, pattern in ROLES.items() if re.search(pattern, command)), command[:60])
    if isinstance(process, psutil.Popen):
        name = "launcher"
    elif name == "trainer rank" and parallel.pipeline > 1:
        name += f", pipeline stage {int(rank) * parallel.pipeline // parallel.ranks}"
    return (name, int(found[1]) << 10) if found and name else None


def gib(size: int) -> str:
    return f"{size / (1 << 30):.2f}"


if __name__ == "__main__":
    main()
