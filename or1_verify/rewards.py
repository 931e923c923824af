"""Reward functions for other trainers (TRL, verl, slime, prime-rl), each with the signature that its trainer expects.

    TRL        GRPOTrainer(reward_funcs=or1_verify.rewards.trl, ...)
    verl       custom_reward_function.path=.../or1_verify/rewards.py custom_reward_function.name=verl
    slime      --custom-rm-path or1_verify.rewards.slime
    prime-rl   verifiers.Rubric(funcs=[or1_verify.rewards.rubric])

A ground truth is an answer or a list of accepted answers (math), or an object of tests (code). Verifiers live as long
as the process. The environment variable OR1_VERIFY_CONFIG names a file with the section ``verify``. Only slime's data
say which reasoning tag the prompt has opened, and which responses were cut off.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any

from or1_verify.answer import left_open
from or1_verify.config import read_config
from or1_verify.types import Problem, Verdict
from or1_verify.verifier_threads import VerifierThreads
from or1_verify.verifiers import build_verifiers

_TRUTHS = ("ground_truth", "answer", "solution")


def trl(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return a reward for each completion (text or messages). Raises ValueError without a column of ground truths."""
    truths = next((columns[name] for name in _TRUTHS if columns.get(name) is not None), None)
    if truths is None:
        raise ValueError(f"the data has the columns {sorted(columns)}; expected one of: {', '.join(_TRUTHS)}")
    futures = [_verdict(*pair) for pair in zip(truths, completions, strict=True)]
    return [future.result().reward for future in futures]


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> dict[str, float]:
    reward = _verdict(ground_truth, solution_str).result().reward
    return {"score": reward, "acc": reward}


async def slime(args: Any, sample: Any, **_: Any) -> Any:
    """Return the reward of a Sample, or a list of rewards for a list of Samples. ``label`` is the ground truth."""
    if isinstance(sample, list):
        return await asyncio.gather(*(slime(args, one) for one in sample))
    opened = left_open(sample.prompt) if isinstance(sample.prompt, str) else ""
    cut_off = sample.status.value == "truncated"
    return (await asyncio.wrap_future(_verdict(sample.label, opened + sample.response, cut_off))).reward


async def rubric(completion: Any, answer: Any, **_: Any) -> float:
    return (await asyncio.wrap_future(_verdict(answer, completion))).reward


def _verdict(truth: Any, completion: Any, truncated: bool = False) -> Future[Verdict]:
    """Start to judge a completion: a text, or the last of several messages. Raises ValueError for a bad ``truth``."""
    try:
        decoded = json.loads(truth) if isinstance(truth, str) else truth
    except ValueError:
        decoded = truth
    ability = "code" if isinstance(decoded, Mapping) else "math"
    several = isinstance(decoded, list) and all(isinstance(gold, str) for gold in decoded)
    golds = json.dumps(decoded if several or ability == "code" else [str(truth)])
    problem = Problem("", "", ability, (), golds, {}, "the reward function")
    threads = _threads(ability, os.getpid())
    with threads.borrowed() as verifiers:
        verifiers[ability].check_ground_truth(problem)
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return threads.verdict(problem, text, truncated)


@cache
def _threads(ability: str, pid: int) -> VerifierThreads:
    """Return an ability's verifier threads. ``pid`` is a key of the cache, since a forked process needs new threads."""
    config = read_config(Path(path) if (path := os.environ.get("OR1_VERIFY_CONFIG")) else None)
    threads = VerifierThreads(partial(build_verifiers, config, {ability}), config.workers)
    atexit.register(threads.close)
    return threads
