"""Measures the memory of each of a run's processes on a machine without GPUs, beside the estimate of it.

    python benchmarks/host_memory.py                      # the quickstart
    python benchmarks/host_memory.py --random tied        # 0.1B random weights with a vocabulary of 151,936

Runs ``--steps`` steps of the quickstart's first stage, shortened, and reads the proportional set size (PSS) of every
process of the run several times a second. Prints each kind's peak and the peak of the sum beside the estimate of
``sizing/memory.py``. ``--set`` changes the configuration as ``or1 train`` does.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config, ParallelConfig
from or1_megatron.sizing.memory import needed, process_memory
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
RECIPE = QUICKSTART / "quickstart.yaml"
RANDOM = {
    "vocab_size": 151_936,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
ROLES = {  # the estimate's name of a process: what its command line holds; the first that fits
    "trainer rank": r"or1_megatron\.trainer\.run ",
    "engine": r"EngineActor",
    "rollout manager": r"RolloutManager",
    "verifier process": r"or1_megatron\.verify\.",
    "Ray": r"raylet|gcs_server|ray::|/ray/|reaper",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", choices=("tied", "untied"), help="a random 0.1B model with a large vocabulary")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="or1_memory_") as folder:
        scratch = Path(folder)
        overrides = [*quick(scratch, arguments.steps), *arguments.overrides]
        if arguments.random:
            overrides.append(f"model.hf={random_model(scratch / 'model', arguments.random == 'tied')}")
        config = load_config(RECIPE, overrides)
        estimate = process_memory(config, Shape.of(read_hf_config(config.model.hf)), "cpu")
        peaks, together = measure(overrides, config)
    print("| process | number | measured, GiB | estimated, GiB |\n|---|---|---|---|")
    for each in estimate:
        print(f"| {each.process} | {each.count} | {gib(peaks.pop(each.process, None))} | {gib(each.each)} |")
    for process, peak in peaks.items():
        print(f"| {process} | ? | {gib(peak)} | - |")
    wanted = needed(config, estimate, "cpu")
    print(f"| in all | | {gib(together)} | {gib(wanted)} ({wanted / together - 1:+.0%}) |")


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


def random_model(folder: Path, tied: bool) -> Path:
    """Write random weights (``RANDOM``) with the quickstart's tokenizer."""
    import transformers

    shutil.copytree(QUICKSTART / "base_model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = transformers.Qwen2Config(**RANDOM, tie_word_embeddings=tied)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def measure(overrides: list[str], config: Config) -> tuple[dict[str, int], int]:
    """Run the recipe; return the peak bytes by the estimate's names, of the largest process of each (Ray's together),
    and the peak of the sum of all processes."""
    command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(RECIPE)]
    run = psutil.Popen([*command, *(part for each in overrides for part in ("--set", each))], cwd=ROOT)
    peaks: dict[str, int] = collections.defaultdict(int)
    together = 0
    while run.poll() is None:
        held: dict[str, list[int]] = collections.defaultdict(list)
        for process in [run, *children(run)]:
            if (found := name_and_pss(process, config.parallel)) is not None:
                held[found[0]].append(found[1])
        for name, sizes in held.items():
            peaks[name] = max(peaks[name], sum(sizes) if name == "Ray" else max(sizes))
        together = max(together, sum(map(sum, held.values())))
        time.sleep(0.05)
    if run.returncode:
        raise SystemExit(f"the run failed: exit code {run.returncode}")
    return peaks, together


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
    return (name, int(found[1]) << 10) if found else None


def gib(size: int | None) -> str:
    return "-" if size is None else f"{size / (1 << 30):.2f}"


if __name__ == "__main__":
    main()
