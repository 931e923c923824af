"""The math verifier against hand-labelled answers, hangs and deaths of its child process.

The table is small and friendly; how often the verifier errs on real answers it does not say.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import math_pairs
import psutil
import pytest

from or1_verify.answer import after_reasoning, last_box, left_open
from or1_verify.config import MathConfig
from or1_verify.math.verifier import MathVerifier
from or1_verify.types import Message, Problem

sys.path.insert(0, str(Path(__file__).parent))
from math_table import AFTER_THINK, HANGS, WHOLE
from waiting import wait_until


def problem(golds: list[str] | str) -> Problem:
    truth = golds if isinstance(golds, str) else json.dumps(golds)
    return Problem("id", "s", "math", (Message("user", "q"),), truth, {}, "x.jsonl:1")


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    made = MathVerifier(timeout_s=60.0)  # generous: other tests may share the cores
    yield made
    made.close()


@pytest.mark.parametrize(("golds", "answer", "status"), AFTER_THINK)
def test_labelled_answers(verifier: MathVerifier, golds: list[str], answer: str, status: str) -> None:
    verdict = verifier.verify(problem(golds), f"Let me think.\n</think>\n{answer}", truncated=False)
    assert (verdict.status, verdict.reward) == (status, float(status == "right")), verdict


@pytest.mark.parametrize(("golds", "response", "truncated", "status"), WHOLE)
def test_labelled_responses(
    verifier: MathVerifier, golds: list[str], response: str, truncated: bool, status: str
) -> None:
    verdict = verifier.verify(problem(golds), response, truncated)
    assert (verdict.status, verdict.reward) == (status, float(status == "right")), verdict


def test_a_right_answer_that_is_truncated_earns_nothing(verifier: MathVerifier) -> None:
    for golds, answer, _ in AFTER_THINK:
        assert verifier.verify(problem(golds), f"</think>{answer}", truncated=True).status == "truncated"


def test_a_hang_ends_in_a_timeout_and_the_next_sample_is_judged() -> None:
    verifier = MathVerifier(5.0, MathConfig(judge="math_verify"))
    try:
        golds, answer = HANGS[1]  # the first: test_pool
        verdict = verifier.verify(problem(golds), f"</think>{answer}", truncated=False)
        assert (verdict.status, verdict.reward) == ("timeout", 0.0)
        assert verdict.detail == "no answer within 5 s"
        after = verifier.verify(problem([r"\sqrt{8}"]), r"</think>\boxed{2\sqrt{2}}", truncated=False)
        assert after.status == "right"
    finally:
        verifier.close()


def test_a_child_that_is_killed_is_replaced() -> None:
    """Killed while idle it is not even noticed; its death in a request is covered by the hang above."""
    verifier = MathVerifier(timeout_s=60.0)
    try:
        verifier.verify(problem(["x+y"]), r"</think>\boxed{y+x}", truncated=False)
        first = verifier.worker_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        for _ in range(2):
            verdict = verifier.verify(problem(["x+y"]), r"</think>\boxed{y+x}", truncated=False)
        assert verdict.status == "right"
        assert verifier.worker_pid != first
    finally:
        verifier.close()
    assert verifier.worker_pid is None
    assert not psutil.pid_exists(first)


def _user_s(child: psutil.Process) -> float:
    """Its CPU time in seconds; infinite if it has ended, as by its own timer on a busy machine."""
    try:
        return float(child.cpu_times().user)
    except psutil.NoSuchProcess:
        return math.inf


@pytest.mark.parametrize(
    ("answer", "thread"),
    [("x+y", True), ("z" + "(" * 3000, True), ("z" + "(" * 3000, False)],
    ids=["idle", "busy, by a thread", "busy"],
)
def test_the_child_dies_with_a_parent_that_is_killed(answer: str, thread: bool) -> None:
    """Idle it sees the end of its input. Busy in one endless operation it dies with the parent, or, when a thread has
    started it, by its own timer."""
    program = (
        "import json, threading, time\n"
        "from or1_verify.types import Message, Problem\n"
        "from or1_verify.config import MathConfig\n"
        "from or1_verify.math.verifier import MathVerifier\n"
        f"v = MathVerifier(timeout_s={2.0 if thread else 600.0}, rules=MathConfig(judge='math_verify'))\n"
        "p = Problem('i', 's', 'math', (Message('user', 'q'),), json.dumps(['z']), {}, 'x:1')\n"
        "def judge():\n"
        "    v.verify(p, '</think>' + chr(92) + 'boxed{x}', False)\n"
        "    print(v.worker_pid, flush=True)\n    input()\n"
        f"    v.verify(p, '</think>' + chr(92) + 'boxed{{{answer}}}', False)\n"
        "    print('done', flush=True)\n"
        "    time.sleep(600)\n" + ("threading.Thread(target=judge).start()\n" if thread else "judge()\n")
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        spent_s = child.cpu_times().user
        parent.stdin.write("\n")
        parent.stdin.flush()
        if answer == "x+y":
            assert parent.stdout.readline() == "done\n"
        else:
            wait_until(lambda: _user_s(child) >= spent_s + 0.5, "the child is busy")
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs([child], timeout=60)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ("5", "JSON list"),
        ("[]", "JSON list"),
        ("[5]", "found 5 among the answers"),
        ('[""]', "found '' among"),
        ('{"inputs": []}', "JSON list"),
        ("x=5", "not JSON"),
    ],
)
def test_unusable_ground_truths_are_refused(verifier: MathVerifier, truth: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        verifier.check_ground_truth(problem(truth))
    assert words in str(caught.value)


def test_last_box_reads_balanced_braces() -> None:
    assert last_box(r"\boxed{\frac{1}{2}} ") == r"\frac{1}{2}"
    assert last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_box(r"\boxed{1} \boxedtext{2}") == "1"
    assert last_box(r"\boxed{1} \boxed{2") == ""
    assert last_box(r"\boxed 5") == "5"
    assert last_box("none") is None
    assert after_reasoning("a</think>b") == "b"
    assert after_reasoning("a") == "a" and after_reasoning("<think>a") is None
    assert after_reasoning("[THINK]a[/THINK]b") == "b"
    assert left_open("<|Assistant|><think>\n") == "<think>" and left_open("Close <think> soon.") == ""


def as_released(response: str, golds: list[str]) -> float:
    """The released code's verdict, from Math-Verify itself: what follows the first ``</think>``, or all of it."""
    from math_verify import parse, verify

    parts = response.split("</think>")
    read = parse(parts[1] if len(parts) > 1 else response, parsing_timeout=None)
    if len(read) < 2:
        return 0.0
    equal = (verify(parse(f"\\boxed{{{gold}}}", parsing_timeout=None), read, timeout_seconds=None) for gold in golds)
    return float(read[1] in golds or any(equal))


def test_the_released_judge_gives_the_released_verdicts() -> None:
    """On the labelled table and the labelled pairs of three classes, truncated or not, reasoning closed or not.

    The oracle calls Math-Verify by itself. Not proven: that the released runs used this version of Math-Verify.
    """
    pairs = [pair for pair in math_pairs.load("tuning") if pair.kind in ("decimals", "percent", "intervals")]
    cases = [(golds, f"so</think>\n{text}") for golds, text, _ in AFTER_THINK]
    cases += [(golds, text) for golds, text, _, _ in WHOLE]
    cases += [(list(pair.golds), f"</think>\\boxed{{{pair.answer}}}") for pair in pairs]
    verifier = MathVerifier(60.0, MathConfig(judge="math_verify"))
    try:
        verdicts = [verifier.verify(problem(golds), text, truncated=True) for golds, text in cases]
    finally:
        verifier.close()
    for (golds, text), verdict in zip(cases, verdicts, strict=True):
        assert verdict.reward == as_released(text, golds), (golds, text, verdict)
    assert 0.2 < sum(verdict.reward for verdict in verdicts) / len(verdicts) < 0.8
