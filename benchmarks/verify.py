"""The code verifier beside LiveCodeBench's harness and verl's ``prime_code``, on the same submissions, interleaved.

    python benchmarks/verify.py --livecodebench CHECKOUT --verl CHECKOUT

The submissions are hand-written (code_corpus.py), and reading them decided which are right. The peers' code is not part
of this repository: give checkouts of theirs. They run submissions without a sandbox; run this where that is harmless.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from code_corpus import HACKS, HONEST, PROBLEMS
from result import figure, write_result

from or1_verify.code.livecodebench import as_input_output
from or1_verify.code.verifier import CodeVerifier
from or1_verify.config import VerifyConfig
from or1_verify.types import Message, Problem

TESTS = 30
STDIN = {"inputs": [f"{n}\n" for n in range(TESTS)], "outputs": [f"{n * n}\n" for n in range(TESTS)]}
CALLS = {"inputs": [f"{n}" for n in range(TESTS)], "outputs": [f"{n * n}" for n in range(TESTS)], "fn_name": "f"}
OURS_ALONE = frozenset(
    name for name, truth in PROBLEMS.items() if {"checker", "limits"} & truth.keys() or name in ("reverse", "depth")
)
"""Problems with a checker, with limits of their own or with nodes. Both peers have none, and ignore them."""

SPEED = (("stdin", STDIN, "n = int(input())\nprint(n * n)"), ("call", CALLS, "def f(n):\n    return n * n"))


class Ours:
    name = "ours"

    def __init__(self) -> None:
        self._verifier = CodeVerifier(VerifyConfig(timeout_s=6.0))

    def judge(self, truth: Mapping[str, Any], source: str) -> tuple[bool, float]:
        problem = Problem("id", "s", "code", (Message("user", "q"),), json.dumps(truth), {}, "corpus")
        started_s = time.perf_counter()
        verdict = self._verifier.verify(problem, f"</think>\n```python\n{source}\n```", truncated=False)
        return verdict.reward == 1.0, time.perf_counter() - started_s

    def close(self) -> None:
        self._verifier.close()


class Peer:
    def __init__(self, name: str, checkout: Path, folder: Path) -> None:
        self.name, self._folder, self._asked = name, folder, 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("verify_peer.py")), name, str(checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def judge(self, truth: Mapping[str, Any], source: str) -> tuple[bool, float]:
        self._asked += 1
        answer = self._folder / f"{self.name}-{self._asked}.json"
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"truth": truth, "source": source, "answer": str(answer)}) + "\n")
        while "done" not in (line := self._process.stdout.readline()):  # submissions may print there as well
            if not line:
                raise RuntimeError(
                    f"{self.name}'s grader ended (exit status {self._process.wait()}): see verify_peer.py"
                )
        reply = json.loads(answer.read_text())
        return reply["accepted"], reply["wall_s"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def for_peers(truth: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the row in the form that both peers read, without its checker; None for kinds that they do not have."""
    if "private_test_cases" in truth:
        truth = as_input_output(truth)
    if "inputs" not in truth or not all(isinstance(item, str) for item in truth["outputs"]):
        return None
    return {name: truth[name] for name in ("inputs", "outputs", "fn_name") if truth.get(name)}


def verdicts(graders: list[Any], cases: list[tuple[str, str, str]]) -> list[dict[str, bool | None]]:
    """Return each grader's verdict on each case; None where it has no such kind."""
    found = []
    for problem, _, source in cases:
        given = for_peers(PROBLEMS[problem])
        row: dict[str, bool | None] = {}
        for grader in graders:
            truth = PROBLEMS[problem] if grader.name == "ours" else given
            row[grader.name] = None if truth is None else grader.judge(truth, source)[0]
        found.append(row)
    return found


def speeds(graders: list[Any], repetitions: int) -> dict[str, dict[str, float]]:
    """Return the median of tests per second, by kind and grader, judging one submission at a time."""
    found: dict[str, dict[str, float]] = {}
    for kind, truth, source in SPEED:
        walls: dict[str, list[float]] = {grader.name: [] for grader in graders}
        for _ in range(repetitions):
            for grader in graders:
                accepted, wall_s = grader.judge(truth, source)
                assert accepted, (grader.name, kind)
                walls[grader.name].append(wall_s)
        found[kind] = {name: TESTS / statistics.median(values) for name, values in walls.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--livecodebench", type=Path, required=True)
    parser.add_argument("--verl", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    checkouts = {"livecodebench": arguments.livecodebench, "verl": arguments.verl}
    with tempfile.TemporaryDirectory() as folder:
        graders: list[Any] = [Ours(), *(Peer(name, path, Path(folder)) for name, path in checkouts.items())]
        try:
            honest = [(problem, "right" if right else "wrong", source) for problem, right, _, source in HONEST]
            figures, settings = report(verdicts(graders, honest), verdicts(graders, HACKS), honest)
            for kind, rates in speeds(graders, arguments.repetitions).items():
                for name, rate in rates.items():
                    limit = {"at_least": 30.0} if (name, kind) == ("ours", "stdin") else {}
                    figures[f"{name}: {kind} tests per second"] = figure(round(rate, 1), **limit)
        finally:
            for grader in graders:
                grader.close()
    settings |= {name: commit(path) for name, path in checkouts.items()}
    sys.argv = [sys.argv[0], "--livecodebench", "CHECKOUT", "--verl", "CHECKOUT"]  # not this machine's paths
    write_result("verify_peers", figures, settings)


def report(
    honest_rows: list[dict[str, bool | None]],
    hack_rows: list[dict[str, bool | None]],
    honest: list[tuple[str, str, str]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, settings): agreement with the reading, hacks accepted, and every disagreement in words."""
    figures: dict[str, Any] = {}
    listed: dict[str, list[str]] = {}
    for name in honest_rows[0]:
        judged = [(row[name], case) for row, case in zip(honest_rows, honest, strict=True) if row[name] is not None]
        wrong = [(found, case) for found, case in judged if found is not (case[1] == "right")]
        share = 1 - len(wrong) / len(judged)
        limit = {"at_least": 1.0} if name == "ours" else {}
        figures[f"{name}: honest judged"] = figure(len(judged))
        plain = [case for _, case in judged if case[0] not in OURS_ALONE]
        plain_wrong = [case for _, case in wrong if case[0] not in OURS_ALONE]
        figures[f"{name}: honest as read"] = figure(round(share, 4), "share", **limit)
        figures[f"{name}: of these without checker or nodes"] = figure(
            round(1 - len(plain_wrong) / len(plain), 4), "share", **limit
        )
        listed[name] = [
            f"{problem}: {'accepts what is wrong' if found else 'refuses what is right'}: {source}"
            for found, (problem, _, source) in wrong
        ]
        tried = [(row[name], case) for row, case in zip(hack_rows, HACKS, strict=True) if row[name] is not None]
        accepted = [f"{problem}: {how}" for found, (problem, how, _) in tried if found]
        none = {"at_most": 0} if name == "ours" else {}
        figures[f"{name}: hacks tried"] = figure(len(tried))
        figures[f"{name}: hacks accepted"] = figure(len(accepted), **none)
        listed[f"{name}, hacks accepted"] = accepted
    return figures, {
        "honest": len(honest),
        "hacks": len(HACKS),
        "tests a problem (speed)": TESTS,
        "disagreements": listed,
    }


def commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "not a git checkout"


if __name__ == "__main__":
    main()
