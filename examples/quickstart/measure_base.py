"""Measures the quickstart's base model: accuracy and truncation at both contexts, and each habit when it is forced.

    python examples/quickstart/measure_base.py --model examples/quickstart/base_model --data runs/quickstart_data

One vLLM engine at temperature 1, the trainer's own math verifier. A habit is forced by appending its first words to
the prompt (``demonstrations.HABIT_PREFIXES``).
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the folder of an example is not a package
from demonstrations import HABIT_PREFIXES

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.data.problems import load_problems
from or1_megatron.data.prompts import encode_problems
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.rollout.engine import EngineSettings, VllmEngine
from or1_megatron.rollout.engine_pool import engine_env
from or1_megatron.types import Completion, Prompt, Request, Sampling
from or1_verify.math.verifier import MathVerifier
from or1_verify.problems.unusable import UnusableRows

CONTEXTS_TOKENS = (56, 96)  # T of the two stages
MAX_PROMPT_TOKENS = 32
SAMPLES = 8
SEED = 20250522


@dataclass(frozen=True)
class Measured:
    accuracy: float
    truncated: float
    mean_length_tokens: float
    entropy: float  # minus the mean log-prob of the sampled tokens, nats


def sample(engine: VllmEngine, prompts: list[Prompt], max_tokens: int) -> list[Completion]:
    """SAMPLES responses to each prompt."""
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_tokens=max_tokens)
    engine.submit(
        [Request(p, k, sampling, SEED + SAMPLES * i + k) for i, p in enumerate(prompts) for k in range(SAMPLES)]
    )
    completions: list[Completion] = []
    while engine.pending:
        completions += engine.step()
    return completions


def measure(engine: VllmEngine, verifier: MathVerifier, prompts: list[Prompt], max_tokens: int) -> Measured:
    by_id = {prompt.problem.id: prompt.problem for prompt in prompts}
    completions = sample(engine, prompts, max_tokens)
    rewards = [verifier.verify(by_id[c.problem_id], c.text, c.truncated).reward for c in completions]
    return Measured(
        accuracy=float(np.mean(rewards)),
        truncated=float(np.mean([c.truncated for c in completions])),
        mean_length_tokens=float(np.mean([c.token_ids.size for c in completions])),
        entropy=float(-np.concatenate([c.log_probs for c in completions]).mean()),
    )


def show(title: str, measured: Measured) -> None:
    print(
        f"{title:<28} accuracy {measured.accuracy:6.1%}   truncated {measured.truncated:6.1%}   "
        f"length {measured.mean_length_tokens:5.1f}   entropy {measured.entropy:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with heldout.jsonl, as task.py makes it")
    arguments = parser.parse_args()
    os.environ.update(engine_env(RolloutConfig(), (), on_cpu=True))
    tokenizer = load_tokenizer(arguments.model)
    problems = load_problems(arguments.data / "heldout.jsonl")
    prompts = encode_problems(ChatTemplate(tokenizer), problems, MAX_PROMPT_TOKENS, UnusableRows()).prompts
    engine = VllmEngine(
        EngineSettings(
            index=0,
            model=arguments.model,
            dtype="float32",
            max_model_tokens=MAX_PROMPT_TOKENS + max(CONTEXTS_TOKENS) + 8,
            config=RolloutConfig(kv_cache_bytes=64 << 20, placement="separate"),
        )
    )
    verifier = MathVerifier(timeout_s=5.0)
    print(f"{len(prompts)} held-out problems, avg@{SAMPLES}, temperature 1")
    for tokens in CONTEXTS_TOKENS:
        show(f"T = {tokens}", measure(engine, verifier, prompts, tokens))
    for habit, prefix in HABIT_PREFIXES.items():
        words = np.array(tokenizer.encode(prefix, add_special_tokens=False), dtype=np.int32)
        forced = [replace(p, token_ids=np.concatenate((p.token_ids, words))) for p in prompts]
        show(f"{habit} (forced), T = {CONTEXTS_TOKENS[-1]}", measure(engine, verifier, forced, CONTEXTS_TOKENS[-1]))
    verifier.close()


if __name__ == "__main__":
    main()
