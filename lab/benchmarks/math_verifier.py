r"""Measures how often the math verifier errs (in both directions) and how fast it is, compared with Math-Verify.

    python lab/benchmarks/math_verifier.py [--suite NAME=DIR ...] [--golds NAME=FILE ...]
        [--labelled NAME=FILE ...] [--errors]

"Ours" is the default of ``verify.math.judge``; the other verifier is ``verify.math.judge: math_verify``, which gives
the released code's verdicts. ``--suite``: a folder with another project's tests of such rules (``math_suites`` says
which forms it reads): Math-Verify's own, from its source distribution (``pip download --no-binary :all: --no-deps
math-verify==0.9.0``), LightEval's, or those of the MATH data set's normaliser. Labels are the suite's, and we do not
agree with all of them. Only cases whose gold and answer are each one formula count. ``--golds``: a JSONL file of a
public set, judged by ours alone; each gold is a right answer to its own problem and a wrong answer to its neighbour's.
``--labelled``: a public set of labelled answers, judged by ours alone, with ``rounding`` and without.
``--errors`` prints the errors on the tuning part, the suites and the golds, but never those on the frozen third.
Verdicts per second are per second of CPU time, of the verifier and its child process together.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import math_pairs
import psutil
from math_pairs import Pair
from math_suites import gold_pairs, labelled_pairs, suite_pairs
from result import figure, write_result

from or1_verify.config import MathConfig
from or1_verify.math.verifier import MathVerifier
from or1_verify.types import Message, Problem, Verdict

OURS = "ours"
RELEASED = "judge math_verify"
Accepts = Callable[[Pair], bool]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--golds", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--labelled", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput measurement")
    arguments = parser.parse_args()
    sets = {"frozen third": math_pairs.load("frozen"), "tuning part": math_pairs.load("tuning")}
    sets |= {
        "rare notations, frozen half": math_pairs.load("frozen_2"),
        "rare notations, tuning half": math_pairs.load("tuning_2"),
        "more rare notations, frozen half": math_pairs.load("frozen_3"),
        "more rare notations, tuning half": math_pairs.load("tuning_3"),
        "everyday notations, frozen half": math_pairs.load("frozen_4"),
        "everyday notations, tuning half": math_pairs.load("tuning_4"),
        "hostile answers": math_pairs.load("hostile"),
    }
    for suite in arguments.suite:
        name, _, folder = suite.partition("=")
        sets[f"{name}'s tests"] = suite_pairs(Path(folder))
    for golds in arguments.golds:
        name, _, file = golds.partition("=")
        sets[f"{name}'s golds"] = gold_pairs(Path(file))
    verifiers = {OURS: MathVerifier(timeout_s=5.0), RELEASED: MathVerifier(5.0, MathConfig(judge="math_verify"))}
    judges: dict[str, Accepts] = {
        name: lambda pair, verifier=verifier: _accepts(verifier, pair) for name, verifier in verifiers.items()
    }
    figures: dict[str, Any] = {}
    for title, pairs in sets.items():
        asked = {OURS: judges[OURS]} if title.endswith(" golds") else judges
        figures |= error_rates(title, pairs, asked, arguments.errors and "frozen" not in title)
    rounding = MathVerifier(5.0, MathConfig(rounding=True))
    for labelled in arguments.labelled:
        name, _, file = labelled.partition("=")
        sets[name] = labelled_pairs(Path(file))
        both: dict[str, Accepts] = {OURS: judges[OURS], f"{OURS}, rounding": partial(_accepts, rounding)}
        figures |= error_rates(name, sets[name], both, arguments.errors)
    rounding.close()
    figures |= throughput(verifiers, sets["tuning part"], arguments.rounds)
    for judge in verifiers.values():
        judge.close()
    sizes = {
        title: f"{sum(pair.right for pair in pairs)} right, {sum(not pair.right for pair in pairs)} wrong"
        for title, pairs in sets.items()
    }
    print(write_result("math_verifier", figures, {**sizes, "rounds": arguments.rounds}))


def _accepts(verifier: MathVerifier, pair: Pair) -> bool:
    return _verdict(verifier, pair).reward == 1.0


def _verdict(verifier: MathVerifier, pair: Pair) -> Verdict:
    return verifier.verify(_problem(pair), f"</think>\\boxed{{{pair.answer}}}", truncated=False)


def _problem(pair: Pair) -> Problem:
    return Problem("id", "pairs", "math", (Message("user", "?"),), json.dumps(pair.golds), {}, "pairs:1")


def error_rates(title: str, pairs: Sequence[Pair], judges: dict[str, Accepts], show: bool) -> dict[str, Any]:
    """Return, by judge, the share of right answers that it refuses and the share of wrong answers that it accepts."""
    refused, accepted = {}, {}
    for name, accepts in judges.items():
        errors = [pair for pair in pairs if accepts(pair) != pair.right]
        refused[name] = sum(pair.right for pair in errors) / sum(pair.right for pair in pairs)
        accepted[name] = sum(not pair.right for pair in errors) / sum(not pair.right for pair in pairs)
        if show and name == OURS:
            for pair in errors:
                print(
                    "refused " if pair.right else "ACCEPTED", pair.kind, "|", " || ".join(pair.golds), "|", pair.answer
                )
        print(f"{title}: {name}: {refused[name]:.1%} of right refused, {accepted[name]:.1%} of wrong accepted")
    figures = {f"{title}, right answers refused: {name}": figure(value, "share") for name, value in refused.items()}
    figures |= {f"{title}, wrong answers accepted: {name}": figure(value, "share") for name, value in accepted.items()}
    if title == "frozen third":
        for what, rates, limit in (("refused", refused, 0.75), ("accepted", accepted, 1 / 3)):
            ratio = rates[OURS] / rates[RELEASED]
            figures[f"{title}, {what} beside {RELEASED}: {OURS}"] = figure(ratio, at_most=limit)
    return figures


def throughput(verifiers: dict[str, MathVerifier], pairs: Sequence[Pair], rounds: int) -> dict[str, Any]:
    """Return verdicts per CPU second on plain numbers and on the labelled answers; the verifiers take turns."""
    numbers = [Pair("number", (str(n * 37 % 1009),), str(n * 37 % 1009 + (n % 2)), n % 2 == 0) for n in range(1000)]
    labelled = [  # a child that ran into its limit was replaced, and took its CPU time with it
        pair for pair in pairs if all(_verdict(one, pair).status != "timeout" for one in verifiers.values())
    ]
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for title, some in (("plain numbers", numbers), ("labelled answers", labelled)):
            for name, verifier in verifiers.items():
                rates.setdefault(f"verdicts/s/core, {title}: {name}", []).append(_rate(verifier, some))
    medians = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    return {name: figure(value, at_least=400.0) if OURS in name else figure(value) for name, value in medians.items()}


def _rate(verifier: MathVerifier, pairs: Sequence[Pair]) -> float:
    _accepts(verifier, Pair("warm", ("x+1",), "1+x", True))
    child = psutil.Process(verifier.worker_pid)

    def spent_s() -> float:
        times = child.cpu_times()
        return time.process_time() + times.user + times.system

    started_s = spent_s()
    for pair in pairs:
        _accepts(verifier, pair)
    return len(pairs) / (spent_s() - started_s)


if __name__ == "__main__":
    main()
