"""Run folders for the tests of the report page: written by the real store, with numbers that a test can work out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from or1_megatron.runtime.rollout_store import HELD_OUT, RolloutStore
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.runtime.versions import session
from or1_megatron.types import AdvantagedGroup, Completion, Group, Prompt, TokenScores, VersionSpan
from or1_verify.types import Message, Problem, Verdict

CONFIG = """
model: {hf: %s}
algorithm: {entropy: {mode: adaptive, target: 0.25}}
stages:
  - {name: short, max_response_tokens: 8}
  - {name: long, max_response_tokens: 16}
"""

NASTY = "</script><script>window.broken = 1</script> <b>&amp;</b> \u202e\x1b[2J 数学 👩‍🔬\n"


def tokenizer_of_bytes(folder: Path, texts: Sequence[str] = ()) -> Tokenizer:
    """Write a byte-level tokenizer without merges, so that a character of n bytes is n tokens; <eos> is special."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *texts])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def group(name: str, outcomes: Sequence[tuple[str, str]], tokenizer: Tokenizer, source: str = "sums") -> Group:
    """Return a group of (response, verdict status)."""
    problem = Problem(name, source, "math", (Message("user", f"What is {name}? {NASTY}"),), '["7"]', {}, "f:1")
    completions, verdicts = [], []
    for i, (text, status) in enumerate(outcomes):
        cut = status == "truncated"
        ids = np.array(tokenizer.encode(text).ids + ([] if cut else [tokenizer.token_to_id("<eos>")]), np.int32)
        log_probs = -np.linspace(0.0, 2.0, ids.size, dtype=np.float32)
        spans = (VersionSpan(3, 0), VersionSpan(4, 2))
        reason = "length" if cut else "stop"
        completions.append(Completion(name, i, ids, log_probs, text, reason, spans, 0, i, 10.0, 12.5))
        verdicts.append(Verdict(float(status == "right"), status, "7", "", 0.1))  # type: ignore[arg-type]
    return Group(Prompt(problem, np.array([1, 2], np.int32)), tuple(completions), tuple(verdicts))


def trained(one: Group) -> tuple[AdvantagedGroup, TokenScores]:
    """Return (the group with advantages +-1, scores of 0.25 above the engine's and entropies 0, 1, 2, ...)."""
    sign = np.where(one.rewards > 0, 1.0, -1.0).astype(np.float32)
    log_probs = tuple(c.log_probs + np.float32(0.25) for c in one.completions)
    entropies = tuple(np.arange(c.token_ids.size, dtype=np.float32) for c in one.completions)
    return AdvantagedGroup(one, sign), TokenScores(log_probs, entropies)


def write_run(root: Path, steps: int = 4, stage_steps: int = 2, problems: int = 3) -> Path:
    """Write a run of ``steps`` steps, from ``stage_steps`` + 1 on in stage "long". Every step has the same problems, 4
    samples each: p0 all wrong and truncated, p1 half right, p2 all right from step 2 on."""
    folder = RunFolder(root)
    folder.create()
    tokenizer = tokenizer_of_bytes(folder.hf)
    folder.write_config(CONFIG % folder.hf)
    sessions = (session(), {"date": "Monday", "host": "<b>a</b>"})
    folder.sessions.write_text("".join(json.dumps(facts) + "\n" for facts in sessions))
    store = RolloutStore(folder.rollouts, 1 << 30)
    rows = [
        {"step": 0, "evaluation/accuracy": 0.25, "evaluation/pass@16": 0.75, "time/evaluate": 2.0, "time/step": 2.0}
    ]
    for step in range(1, steps + 1):
        stage = int(step > stage_steps)
        groups = []
        for p in range(problems):
            outcomes = [(f"{step}{'ab'[i % 2]}", "truncated") for i in range(4)]
            if p % 3 == 1:
                outcomes = [(f"x={i} {NASTY}", "right" if i < 2 else "wrong") for i in range(4)]
            elif p % 3 == 2:
                outcomes = [(f"y={i}", "right" if step > 1 or i else "wrong") for i in range(4)]
            groups.append(group(f"p{p}", outcomes, tokenizer, source="sums" if p < 2 else "words"))
        kept, scores = zip(*[trained(g) for g in groups if 0 < g.rewards.mean() < 1], strict=True)
        joined = TokenScores(
            tuple(x for s in scores for x in s.log_probs), tuple(x for s in scores for x in s.entropies)
        )
        store.write(step, ("short", "long")[stage], groups, list(kept), joined)
        rows.append(
            {
                "step": step,
                "stage/index": stage,
                "accuracy/all": step / 10,
                "reward/mean": step / 10,
                "rollout/response_tokens": 500.0,
                "entropy/sampled": 0.5 / step,
                "time/roll_out": 3.0,
                "time/update": 1.0,
                "time/step": 4.5,
                "time/other": 0.5,
            }
        )
    store.close()
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def evaluate(root: Path, rights: Mapping[int, str]) -> None:
    """Write held-out responses of a run: by step the numbers of right ones of 4, a digit for each of h0, h1, ..."""
    folder = RunFolder(root)
    store = RolloutStore(folder.evaluations, 1 << 30)
    tokenizer = Tokenizer.from_file(str(folder.hf / "tokenizer.json"))
    for step, digits in rights.items():
        groups = [
            group(f"h{p}", [(f"{step} h{p} {i}", "right" if i < int(n) else "wrong") for i in range(4)], tokenizer)
            for p, n in enumerate(digits)
        ]
        store.write(step, HELD_OUT, groups, [])
    store.close()
