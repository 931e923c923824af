"""What `or1 eval` takes beyond the engines' own time.

    python benchmarks/evaluation.py [--problems 256] [--samples 8] [--long 40] [--rounds 3] [--starts 3]

Bare: the same requests, tokenised and packed before the clock starts, given to the same engines at once, half to each,
and harvested, in bundles of as many seconds as the evaluation's, till the last has come; nothing is judged or written.
Against it, by turns, all that the command does from the moment when its engines are up: prompts, scheduling, verdicts,
responses.jsonl, statistics, results.json and its picture. What it does before, beside the engines' start (problems and
golds are read, the verifiers' processes load), is in the last figure: whole evaluations against starting engines,
sampling bare and closing them.

The quickstart's base model and problems at T = 96: a short run (--samples) and a long one (--long).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import ray
from result import ROOT, figure, write_result
from rich.console import Console

from or1_megatron.commands import asked_model
from or1_megatron.commands.eval import evaluate_model
from or1_megatron.config.schema import RolloutConfig
from or1_megatron.data.chat import chat_seed
from or1_megatron.data.problems import load_problems
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.evaluate.settings import EvaluationSettings
from or1_megatron.rollout.engine_sampler import LINGER_S, EngineSampler
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Prompt, Request, Sampling

Measured = tuple[list[float], list[float], float | None]

_ENGINES_START_S = 5.0
"""Less than engines take: 8 s and more (docs/performance.md)."""

MODEL = ROOT / "examples/quickstart/base_model"
QUIET = Console(quiet=True)


def settings(seed: int) -> EvaluationSettings:
    return EvaluationSettings(
        max_response_tokens=96,
        max_prompt_tokens=64,
        dtype="float32",
        engines=RolloutConfig(engines=2, kv_cache_bytes=1 << 26, placement="separate"),
        seed=seed,
    )


def packed_requests(data: Path, samples: int, seed: int) -> list[bytes]:
    """Return each engine's half of the requests that the evaluation makes, packed."""
    template = ChatTemplate(load_tokenizer(MODEL))
    prompts = [Prompt(problem, template.token_ids(problem.messages)) for problem in load_problems(data)]
    how = Sampling(1.0, 1.0, 96)
    requests = [
        Request(prompt, sample, how, chat_seed(seed, prompt.problem.id, sample))
        for sample in range(samples)
        for prompt in prompts
    ]
    return [pack(requests[part::2]) for part in range(2)]


def bare_s(engines: Sequence[Any], batches: Sequence[bytes]) -> float:
    left = [len(unpack(batch)) for batch in batches]
    started_s = time.perf_counter()
    ray.get([engine.submit.remote(batch) for engine, batch in zip(engines, batches, strict=True)])
    calls = {engine.harvest.remote(5.0, LINGER_S): place for place, engine in enumerate(engines)}
    while calls:
        (done,), _ = ray.wait(list(calls), num_returns=1)
        place = calls.pop(done)
        left[place] -= len(unpack(ray.get(done)).completions)
        if left[place]:
            calls[engines[place].harvest.remote(5.0, LINGER_S)] = place
    return time.perf_counter() - started_s


def evaluation(data: Path, samples: int, how: EvaluationSettings, out: Path) -> None:
    evaluate_model(str(MODEL), str(data), samples, out, how, QUIET, Path("none"))


def evaluation_s(sampler: EngineSampler, data: Path, samples: int, how: EvaluationSettings, out: Path) -> float:
    """From the moment when the engines are up, which are up already: their start is slept through."""
    up_s = []

    @contextmanager
    def running(*_: Any) -> Iterator[EngineSampler]:
        time.sleep(_ENGINES_START_S)
        up_s.append(time.perf_counter())
        yield sampler

    with mock.patch.object(asked_model, "open_model", running):
        evaluation(data, samples, how, out)
    return time.perf_counter() - up_s[0]


def own_cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended (the verifiers)."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def engines_cpu_s() -> float:
    here = psutil.Process().children(recursive=True)
    used = [one.cpu_times() for one in here if one.name().startswith("ray::EngineAct")]
    assert used, "no engine among this process's descendants"
    return float(sum(one.user + one.system for one in used))


def measure_running(data: Path, samples: int, rounds: int, out: Path) -> Measured:
    """Seconds (bare, evaluation) of each round, and CPU beside the engines, verifiers' starts included, per theirs."""
    bare, whole, shares = [], [], []
    with asked_model.open_model(str(MODEL), settings(0), load_problems(data), 512, out, QUIET) as sampler:
        assert isinstance(sampler, EngineSampler)
        for turn in range(rounds + 1):  # the first warms up
            batches = packed_requests(data, samples, turn)
            for evaluated in (turn % 2 == 0, turn % 2 == 1):  # neither is always the first, should the machine drift
                engines_s, others_s = engines_cpu_s(), own_cpu_s()
                if evaluated:
                    whole.append(evaluation_s(sampler, data, samples, settings(turn), out / f"{samples}_{turn}"))
                    shares.append((own_cpu_s() - others_s) / (engines_cpu_s() - engines_s))
                else:
                    bare.append(bare_s(sampler.engines, batches))
            print(
                f"{samples} samples, {turn}: bare {bare[-1]:.2f} s, evaluation {whole[-1]:.2f} s; CPU beside the "
                f"engines': {shares[-1]:.1%}",
                flush=True,
            )
    return bare[1:], whole[1:], statistics.median(shares[1:])


def measure_starting(data: Path, samples: int, rounds: int, out: Path) -> Measured:
    """The same with the engines' start and end on either side."""
    bare, whole = [], []
    for turn in range(rounds):
        batches = packed_requests(data, samples, turn)
        started_s = time.perf_counter()
        with asked_model.open_model(str(MODEL), settings(turn), load_problems(data), 512, out, QUIET) as sampler:
            assert isinstance(sampler, EngineSampler)
            bare_s(sampler.engines, batches)
        between_s = time.perf_counter()
        evaluation(data, samples, settings(turn), out / f"start_{turn}")
        bare.append(between_s - started_s)
        whole.append(time.perf_counter() - between_s)
        print(f"with start, {turn}: bare {bare[-1]:.2f} s, evaluation {whole[-1]:.2f} s", flush=True)
    return bare, whole, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--long", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        task = [sys.executable, str(ROOT / "examples/quickstart/task.py"), "--out", name, "--train", "1"]
        subprocess.run([*task, "--held-out", str(options.problems), "--seed", "1"], check=True, capture_output=True)
        data = out / "heldout.jsonl"
        for title, samples, measure, rounds in (
            ("short", options.samples, measure_running, options.rounds),
            ("long", options.long, measure_running, options.rounds),
            ("long, with the engines' start", options.long, measure_starting, options.starts),
        ):
            if not rounds:
                continue
            bare, whole, share = measure(data, samples, rounds, out)
            ratio = statistics.median(w / b for w, b in zip(whole, bare, strict=True))
            figures[f"evaluation / bare, {title}"] = figure(ratio, at_most=1.05)
            figures[f"bare, {title}"] = figure(statistics.median(bare), "s")
            if share is not None:
                figures[f"CPU of all else / engines', {title}"] = figure(share)
    print(write_result("evaluation", figures, vars(options)), figures)


if __name__ == "__main__":
    main()
