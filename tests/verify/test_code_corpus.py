"""Right, wrong and dishonest submissions of every kind of ground truth, through real sandboxes.

Reading decided what is right (benchmarks/code_corpus.py), not a harness. Not proven: that there are no other ways to
cheat; limits of time and memory (test_limits.py).
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from code_corpus import HACKS, HONEST, PROBLEMS

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.types import Message, Problem
from or1_megatron.verify.code.verifier import CodeVerifier

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def problem(name: str) -> Problem:
    return Problem("id", name, "code", (Message("user", "q"),), json.dumps(PROBLEMS[name]), {}, "x.jsonl:1")


def misjudged(cases: list[tuple[str, str, str]]) -> list[tuple[str, ...]]:
    """The cases that a verifier judges otherwise than they were read."""
    verifier = CodeVerifier(VerifyConfig(timeout_s=10.0))
    found = []
    for name, expected, source in cases:
        verdict = verifier.verify(problem(name), f"</think>\n```python\n{source}\n```", truncated=False)
        if (verdict.status, verdict.reward) != (expected, float(expected == "right")):
            found.append((name, expected, verdict.status, verdict.detail, source))
    verifier.close()
    return found


def test_the_corpus_is_judged_as_read() -> None:
    """By two verifiers at a time."""
    assert len(HONEST) >= 60 and len(HACKS) >= 20
    cases = [(name, "right" if right else "wrong", source) for name, right, source in HONEST]
    cases += [(name, "wrong", source) for name, _, source in HACKS]
    verifier = CodeVerifier(VerifyConfig())
    for name in PROBLEMS:
        verifier.check_ground_truth(problem(name))
    verifier.close()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(misjudged, (cases[::2], cases[1::2]))) == [[], []]
