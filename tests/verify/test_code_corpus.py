"""Right, wrong and dishonest submissions of every kind of ground truth, all through one verifier.

What is right was decided by reading (benchmarks/code_corpus.py), not by any harness. Not proven: that there are no
other ways to cheat; limits of time and memory (test_code_verifier.py).
"""

from __future__ import annotations

import json
import shutil

import pytest
from code_corpus import HACKS, HONEST, PROBLEMS

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.types import Message, Problem
from or1_megatron.verify.code.verifier import CodeVerifier

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def problem(name: str) -> Problem:
    return Problem("id", name, "code", (Message("user", "q"),), json.dumps(PROBLEMS[name]), {}, "x.jsonl:1")


def test_the_corpus_is_judged_as_read() -> None:
    verifier = CodeVerifier(VerifyConfig(timeout_s=10.0))  # the machine may be busy
    assert len(HONEST) >= 60 and len(HACKS) >= 20
    cases = [(name, "right" if right else "wrong", source) for name, right, source in HONEST]
    cases += [(name, "wrong", source) for name, _, source in HACKS]
    for name in PROBLEMS:
        verifier.check_ground_truth(problem(name))
    misjudged = []
    for name, expected, source in cases:
        verdict = verifier.verify(problem(name), f"</think>\n```python\n{source}\n```", truncated=False)
        if (verdict.status, verdict.reward) != (expected, float(expected == "right")):
            misjudged.append((name, expected, verdict.status, verdict.detail, source))
    verifier.close()
    assert misjudged == []
