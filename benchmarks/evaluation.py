"""What an evaluation takes beyond the engines' own time: the same requests sampled bare, and sampled, judged and kept.

    python benchmarks/evaluation.py [--problems 256] [--samples 8] [--rounds 5]

Both on the same running engines, in turn, with the quickstart's base model and problems at T = 96.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from result import ROOT, figure, write_result
from rich.console import Console

from or1_megatron.config import RolloutConfig, VerifyConfig
from or1_megatron.data.pipeline.verdicts import VerifierThreads
from or1_megatron.data.problems import load_problems
from or1_megatron.evaluate.responses import ResponseStore
from or1_megatron.evaluate.run import ask_seed, evaluate
from or1_megatron.evaluate.settings import EvaluationSettings
from or1_megatron.evaluate_model import open_model
from or1_megatron.types import Ask
from or1_megatron.verify.registry import build_verifiers

MODEL = "examples/quickstart/base_model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings = EvaluationSettings(
        max_response_tokens=96,
        max_prompt_tokens=64,
        dtype="float32",
        engines=RolloutConfig(engines=2, kv_cache_bytes=1 << 26, placement="separate"),
    )
    bare, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        task = [sys.executable, str(ROOT / "examples/quickstart/task.py"), "--out", folder, "--train", "1"]
        subprocess.run([*task, "--held-out", str(options.problems), "--seed", "1"], check=True, capture_output=True)
        problems = load_problems(Path(folder) / "heldout.jsonl")
        with open_model(str(ROOT / MODEL), settings, Path(folder), Console(quiet=True)) as sampler:
            for turn in range(options.rounds + 1):  # the first warms up
                seed = 100 + turn
                asks = [
                    Ask(problem.id, sample, problem.messages, ask_seed(seed, problem.id, sample))
                    for sample in range(options.samples)
                    for problem in problems
                ]
                started_s = time.perf_counter()
                assert sum(1 for _ in sampler.sample(asks)) == len(asks)
                bare_s = time.perf_counter() - started_s
                threads = VerifierThreads(
                    lambda timeout_s, abilities: build_verifiers(VerifyConfig(timeout_s=timeout_s), abilities),
                    settings.verify_timeout_s,
                    frozenset({"math"}),
                    settings.verify_workers,
                )
                started_s = time.perf_counter()
                with closing(ResponseStore(Path(folder) / f"round_{turn}", {})) as store, closing(threads):
                    evaluate(problems, options.samples, sampler, threads.verdict, store, seed)
                whole_s = time.perf_counter() - started_s
                print(f"{turn}: bare {bare_s:.2f} s, whole {whole_s:.2f} s", flush=True)
                if turn:
                    bare.append(bare_s)
                    whole.append(whole_s)
    ratio = statistics.median(w / b for w, b in zip(whole, bare, strict=True))
    figures = {
        "evaluation / bare sampling, wall": figure(ratio, at_most=1.05),
        "bare sampling": figure(statistics.median(bare), "s"),
    }
    print(write_result("evaluation", figures, vars(options)), figures)


if __name__ == "__main__":
    main()
