"""Measures how often the exported HF model gives, in transformers, the engine's greedy answers.

    python lab/benchmarks/greedy_agreement.py --model runs/quickstart/hf --data runs/quickstart_data/heldout.jsonl

Both compute in fp32, up to 96 tokens. Prints the share of problems with the same tokens, and with the same answer.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.data.problems import load_problems
from or1_megatron.data.prompts import encode_problems
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.rollout.engine import EngineSettings, VllmEngine
from or1_megatron.rollout.engine_pool import engine_env
from or1_megatron.types import Prompt, Request, Sampling
from or1_verify.answer import after_reasoning, last_box
from or1_verify.problems.unusable import UnusableRows

MAX_TOKENS = 96
MAX_PROMPT_TOKENS = 32


def engine_answers(model: Path, prompts: list[Prompt]) -> list[list[int]]:
    os.environ.update(engine_env(RolloutConfig(), (), on_cpu=True))
    longest = MAX_PROMPT_TOKENS + MAX_TOKENS
    config = RolloutConfig(kv_cache_bytes=64 << 20, placement="separate")
    engine = VllmEngine(EngineSettings(0, model, "float32", longest, config))
    greedy = Sampling(temperature=0.0, top_p=1.0, max_response_tokens=MAX_TOKENS)
    engine.submit([Request(prompt, 0, greedy, index) for index, prompt in enumerate(prompts)])
    found: dict[int, list[int]] = {}
    while engine.pending:
        found.update({c.seed: c.token_ids.tolist() for c in engine.step()})
    return [found[index] for index in range(len(prompts))]


@torch.no_grad()
def transformers_answers(model: Path, prompts: list[Prompt], end: int) -> list[list[int]]:
    """Return the greedy responses of transformers. It gets one prompt at a time, without padding and batches."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
        out = network.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=0)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def answer(response: str) -> str | None:
    """Return the answer that the verifier would extract from a response; None without any."""
    conclusion = after_reasoning(response)
    return None if conclusion is None else last_box(conclusion)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    problems = load_problems(arguments.data)
    prompts = encode_problems(ChatTemplate(tokenizer), problems, MAX_PROMPT_TOKENS, UnusableRows()).prompts
    theirs = transformers_answers(arguments.model, prompts, tokenizer.eos_token_id)
    ours = engine_answers(arguments.model, prompts)
    same_tokens = np.mean([a == b for a, b in zip(ours, theirs, strict=True)])
    answered = np.mean([answer(tokenizer.decode(a)) is not None for a in ours])
    same_answer = np.mean(
        [answer(tokenizer.decode(a)) == answer(tokenizer.decode(b)) for a, b in zip(ours, theirs, strict=True)]
    )
    print(
        f"{len(prompts)} problems: same tokens {same_tokens:.1%}, same answer {same_answer:.1%}, "
        f"answered {answered:.1%}"
    )


if __name__ == "__main__":
    main()
