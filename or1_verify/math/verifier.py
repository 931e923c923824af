r"""The math verifier: compares the last box after the reasoning with the gold answers, by their types.

A truncated response, or one that never closes its reasoning, has reward 0, except with the judge ``math_verify``.
The answer is the last box after ``</think>``, or, without a box, the value that the last sentence claims
(``math.claim``). It is right if it equals a gold answer as text, or by the rules of ``math.reader``
(docs/math_verifier.md).

An answer is compared in a child process that is killed and replaced at its time limit, ``verify.timeout_s``; the status
is then ``timeout``.
"""

from __future__ import annotations

import subprocess
import time
from functools import lru_cache

from pydantic_core import from_json

from or1_verify.answer import THINK_CLOSE, after_reasoning, last_box
from or1_verify.child_process import ChildProcess
from or1_verify.config import MathConfig
from or1_verify.math.claim import claimed_answer
from or1_verify.types import Problem, Verdict, VerdictStatus

_UNBOXED_CHARS = 2000
"""Number of characters at the end of a text without a box that are searched for a claim."""

_BOX_CHARS = 8000
"""A box with more characters is wrong. The golds of the data have a few hundred characters at most."""

_EXPECTED = 'expected a JSON list of one or more acceptable answers as strings, such as ["15625"]'


class MathVerifier:
    """The ``types.Verifier`` for ability "math". ``rules``: the section ``verify.math``; None means its defaults.

    The child process starts when a verdict first needs it.
    """

    def __init__(self, timeout_s: float, rules: MathConfig | None = None) -> None:
        self._rules = rules or MathConfig()
        self._child = ChildProcess(
            "or1_verify.math.math_process", self._rules.judge, timeout_s=timeout_s, stderr=subprocess.DEVNULL
        )
        self._golds_of = lru_cache(maxsize=1)(parse_golds)  # a group's responses come in a row

    @property
    def worker_pid(self) -> int | None:
        return self._child.pid

    def start(self) -> None:
        self._child.start()

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError unless the ground truth is a JSON list of answers.

        A gold that cannot be read is no error: an answer with the gold's text is right, any other is ``unreadable``.
        """
        parse_golds(problem.ground_truth)

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Judge a response: reward 1 if it ended by itself, closed its reasoning and gave a right answer, else 0.

        The judge ``math_verify``, like the released code, also judges truncated responses and unclosed reasoning.
        """
        started_s = time.perf_counter()

        def verdict(status: VerdictStatus, answer: str, detail: str) -> Verdict:
            return Verdict(float(status == "right"), status, answer, detail, time.perf_counter() - started_s)

        if self._rules.judge == "math_verify":  # as the released code: truncated or not, closed or not
            whole = response.split(THINK_CLOSE)[1] if THINK_CLOSE in response else response
            return verdict(*self._child.judge({"golds": self._golds_of(problem.ground_truth), "answer": whole}))
        if truncated:
            return verdict("truncated", "", "cut off at the response-length limit")
        text = after_reasoning(response)
        if text is None:
            return verdict("no_answer", "", "the reasoning is never closed")
        if not text.strip():
            return verdict("no_answer", "", "nothing follows the reasoning")
        golds = self._golds_of(problem.ground_truth)
        box = last_box(text)
        if box == "":
            return verdict("no_answer", "", "the last box is empty or never closes")
        if box in golds:
            return verdict("right", box or "", "the same text")
        if box is not None and len(box) > _BOX_CHARS:
            return verdict("wrong", box[:_BOX_CHARS], f"an answer of {len(box)} characters, more than {_BOX_CHARS}")
        if box is None:
            box = claimed_answer(text[-_UNBOXED_CHARS:]) if self._rules.without_box == "claimed" else None
        if box is None:
            claims = ", and the last sentence claims no single value" if self._rules.without_box == "claimed" else ""
            return verdict("no_answer", "", f"no box{claims}")
        status, read, detail = self._child.judge({"golds": golds, "answer": box, "rounding": self._rules.rounding})
        return verdict(status, read or box, detail)

    def close(self) -> None:
        self._child.close()


def parse_golds(ground_truth: str) -> list[str]:
    """Return the acceptable answers of a math problem. Raises ValueError saying what was expected."""
    try:
        golds = from_json(ground_truth)
    except ValueError:
        raise ValueError(f"{_EXPECTED}; found {ground_truth[:200]!r}, which is not JSON") from None
    if not isinstance(golds, list) or not golds:
        raise ValueError(f"{_EXPECTED}; found {ground_truth[:200]!r}")
    for gold in golds:
        if not isinstance(gold, str) or not gold.strip():
            raise ValueError(f"{_EXPECTED}; found {gold!r} among the answers")
    return [gold.strip() for gold in golds]
