"""Right, wrong and dishonest submissions of every kind of ground truth, through real sandboxes of both tiers.

Reading decided what is right (lab/benchmarks/code_corpus.py), not a harness. Not proven: that there are no other ways
to cheat; limits of time and memory (test_limits.py).
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from code_corpus import HACKS, HONEST, NEEDS, PROBLEMS

from or1_verify.code.verifier import CodeVerifier
from or1_verify.config import VerifyConfig
from or1_verify.sandbox.program import SandboxTier, SandboxUnavailable
from or1_verify.types import Message, Problem

TIERS: tuple[SandboxTier, ...] = ("bubblewrap", "landlock")
SAMPLED = 12  # `make test` runs every so many-th submission, `make test-slow` all of them

Case = tuple[str, str, str, str]
CASES: list[Case] = [(name, "right" if right else "wrong", style, source) for name, right, style, source in HONEST]
CASES += [(name, "wrong", how, source) for name, how, source in HACKS]


def problem(name: str, **more: object) -> Problem:
    return Problem("id", name, "code", (Message("user", "q"),), json.dumps({**more, **PROBLEMS[name]}), {}, "x.jsonl:1")


def opened(tier: SandboxTier) -> CodeVerifier:
    try:
        return CodeVerifier(VerifyConfig(sandbox=tier))
    except SandboxUnavailable as error:
        pytest.skip(f"no {tier} here: {error}")


def misjudged(tier: SandboxTier, cases: list[Case]) -> list[tuple[str, ...]]:
    """The cases that are judged otherwise than they were read, by two verifiers at a time."""

    def some(cases: list[Case]) -> list[tuple[str, ...]]:
        verifier = opened(tier)
        results = []
        for name, expected, style, source in cases:
            asked = problem(name, limits={"time_s": 30}) if expected == "right" else problem(name)
            verdict = verifier.verify(asked, f"</think>\n```python\n{source}\n```", truncated=False)
            if (verdict.status, verdict.reward) != (expected, float(expected == "right")):
                results.append((name, expected, style, verdict.status, verdict.detail, source))
        verifier.close()
        return results

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(some, (cases[::2], cases[1::2]))
    return first + second


def of_tier(tier: SandboxTier) -> list[Case]:
    """All cases; for landlock the wrong ones, and every fourth of the right ones that it can run."""
    if tier == "bubblewrap":
        return CASES
    right = [case for case in CASES if case[1] == "right" and not case[2].startswith(NEEDS)]
    return [case for case in CASES if case[1] == "wrong"] + right[::4]


def test_the_corpus_is_usable() -> None:
    verifier = opened("bubblewrap")
    for name in PROBLEMS:
        verifier.check_ground_truth(problem(name))
    verifier.close()


@pytest.mark.parametrize("tier", TIERS)
def test_a_sample_of_the_corpus_is_judged_as_read(tier: SandboxTier) -> None:
    opened(tier).close()
    assert misjudged(tier, of_tier(tier)[::SAMPLED]) == []


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_the_corpus_is_judged_as_read(tier: SandboxTier) -> None:
    opened(tier).close()
    assert len(HACKS) >= 130
    assert misjudged(tier, of_tier(tier)) == []
