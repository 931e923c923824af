"""Measures the memory of each of a run's processes on a machine without GPUs, beside the estimate of it.

    python benchmarks/host_memory.py                      # the quickstart
    python benchmarks/host_memory.py --random tied        # 0.1B random weights with a vocabulary of 151,936

Runs the quickstart's recipe for ``--steps`` steps of its first stage, and reads the proportional set size (PSS) of
every process of the run as often as it can. Prints each role's peak and the peak of the sum, in GiB, beside what
``sizing/memory.py`` expects. ``--set`` changes the configuration as ``or1 train`` does.
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

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
VOCABULARY = 151_936
RANDOM = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
ROLES = (  # what a command line holds, in the order of the search
    (r"or1_megatron\.trainer\.run .*", "rank"),
    (r"EngineActor|VLLM|EngineCore", "engine"),
    (r"RolloutManager", "manager"),
    (r"spawn_main|forkserver|verify", "verifier"),
    (r"raylet|gcs_server|ray::|/ray/|reaper", "Ray"),
)


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
        peaks, together = measure(overrides)
    for role, peak in sorted(peaks.items()):
        print(f"{role:24} {peak / (1 << 30):6.2f}")
    print(f"{'sum at its peak':24} {together / (1 << 30):6.2f}")


def quick(scratch: Path, steps: int) -> list[str]:
    """Make the quickstart's data; return the overrides of a short run of it."""
    data = scratch / "data"
    make = [sys.executable, str(QUICKSTART / "task.py"), "--out", str(data)]
    subprocess.run([*make, "--train", "512", "--held-out", "16", "--seed", "1"], check=True, cwd=ROOT)
    return [
        f"run.dir={scratch / 'run'}",
        f"data.train.0.path={data / 'train.jsonl'}",
        f"evaluate.data.0.path={data / 'heldout.jsonl'}",
        f"stages.0.steps={steps}",
        f"stages.1.steps={steps}",
        "algorithm.advantage.reject_uniform_groups=false",  # of random weights all answers are wrong
        "cluster.check_memory=false",
    ]


def random_model(folder: Path, tied: bool) -> Path:
    """Write random weights (``RANDOM``) with the quickstart's tokenizer."""
    import transformers

    shutil.copytree(QUICKSTART / "base_model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = transformers.Qwen2Config(**RANDOM, tie_word_embeddings=tied)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def measure(overrides: list[str]) -> tuple[dict[str, int], int]:
    """Run the recipe; return the peak bytes of each process by role and number, and the peak of their sum."""
    command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(QUICKSTART / "quickstart.yaml")]
    run = psutil.Popen([*command, *(part for each in overrides for part in ("--set", each))], cwd=ROOT)
    peaks: dict[tuple[str, int], int] = collections.defaultdict(int)
    together = 0
    while run.poll() is None:
        found = {key: size for process in [run, *run.children(recursive=True)] for key, size in pss(process, run.pid)}
        together = max(together, sum(found.values()))
        for key, size in found.items():
            peaks[key] = max(peaks[key], size)
        time.sleep(0.05)
    if run.returncode:
        raise SystemExit(f"the run failed: {run.returncode}")
    return {f"{role} {pid}": peak for (role, pid), peak in peaks.items()}, together


def pss(process: psutil.Process, launcher: int) -> list[tuple[tuple[str, int], int]]:
    """Return the process's role, pid and bytes; nothing when it has just ended."""
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        command = " ".join(process.cmdline())
        rank = process.environ().get("RANK", "")
    except (OSError, psutil.Error):
        return []
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    role = next((role for pattern, role in ROLES if re.search(pattern, command)), command[:60])
    if process.pid == launcher:
        role = "launcher"
    elif role == "rank":
        role = f"rank {rank}"
    return [((role, process.pid), int(found[1]) << 10)] if found else []


if __name__ == "__main__":
    main()
