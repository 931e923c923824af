"""Two finished evaluations of the same problems, compared problem by problem, and their comparison in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from or1_megatron.evaluate.intervals import Rewards, Score, difference, sizes
from or1_megatron.evaluate.responses import RESPONSES, RESULTS, EvaluationError
from or1_megatron.runtime.jsonl import read_rows

_ASKED: Final = ("data", "since", "until", "release", "max_response_tokens", "temperature", "top_p", "seed", "dtype")
"""Settings in ``results.json`` that may differ and influence the scores' difference."""
_NAMED: Final = 5
_EXCERPT_CHARS: Final = 80
AskedProblem = Mapping[str, str]
"""A problem's fields from ``responses.jsonl``: id, source, ground_truth, prompt."""


@dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """An evaluation's results, its problems in a fixed order, and their rewards [P, k]."""

    folder: Path
    results: Mapping[str, Any]
    problems: Sequence[AskedProblem]
    rewards: Rewards


@dataclass(frozen=True, slots=True)
class ScorePair:
    """One score of both evaluations, and second minus first."""

    name: str
    first: float
    second: float
    difference: Score


@dataclass(frozen=True, slots=True)
class ChangedProblem:
    """A problem that most samples solve in only one of the evaluations. Counts are of right samples."""

    problem: AskedProblem
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second evaluation against the first."""

    folders: tuple[str, str]
    models: tuple[str, str]
    samples: int
    problems: int
    scores: Sequence[ScorePair]
    gained: Sequence[ChangedProblem]
    """Solved by most samples in the second only; the largest change first."""
    lost: Sequence[ChangedProblem]
    asked_otherwise: Mapping[str, tuple[Any, Any]]
    """Settings that differ."""


def compare(first: Path, second: Path) -> Comparison:
    """Compare two folders of ``or1 eval``.

    Raises:
        EvaluationError: a folder is not of a finished evaluation, or their problems or numbers of samples differ; the
            error names all faults.
    """
    evaluations, faults = [], []
    for folder in (first, second):
        try:
            evaluations.append(_read(folder))
        except EvaluationError as error:
            faults.append(str(error))
    if not faults:
        faults = _differences(*evaluations)
    if faults:
        raise EvaluationError("\n".join(faults))
    one, two = evaluations
    k = one.rewards.shape[1]
    right = [side.rewards.sum(axis=1).astype(int).tolist() for side in evaluations]
    counted = [ChangedProblem(*of) for of in zip(one.problems, *right, strict=True)]
    changed = [it for it in counted if (2 * it.first > k) != (2 * it.second > k)]
    changed.sort(key=lambda it: (-abs(it.second - it.first), it.problem["id"]))
    named = {f"avg@{k}": 1} | {f"pass@{size}": size for size in sizes(k) if size > 1}
    return Comparison(
        folders=(str(first), str(second)),
        models=(str(one.results["model"]), str(two.results["model"])),
        samples=k,
        problems=len(one.problems),
        scores=[ScorePair(name, *difference(one.rewards, two.rewards, size)) for name, size in named.items()],
        gained=[it for it in changed if it.second > it.first],
        lost=[it for it in changed if it.second < it.first],
        asked_otherwise={
            key: (one.results.get(key), two.results.get(key))
            for key in _ASKED
            if one.results.get(key) != two.results.get(key)
        },
    )


def comparison_page(compared: Comparison, most: int | None = None) -> str:
    """Return the page: scores, differences, and problems gained and lost, ``most`` per table (None: all)."""
    otherwise = [f"{key} {one}, {two}" for key, (one, two) in compared.asked_otherwise.items()]
    sides = zip(("first", "second"), compared.models, compared.folders, strict=True)
    head = [
        *(f"{name}: {model} ({folder})" for name, model, folder in sides),
        f"{compared.problems:,} problems x {compared.samples} samples each",
        *([f"asked otherwise (first, second): {'; '.join(otherwise)}"] if otherwise else []),
    ]
    parts = [
        "# Comparison of two evaluations",
        "\n".join(f"- {_plain(line)}" for line in head),
        _table(
            ("", "first", "second", "difference", "95%, other samples", "95%, other problems"),
            [_score_cells(score) for score in compared.scores],
        ),
        "The difference is the second less the first, problem by problem. *Other samples*: a second run of both "
        "evaluations; *other problems*: another set of such problems, by a bootstrap over problems.",
    ]
    for changed, which in ((compared.gained, "second"), (compared.lost, "first")):
        rows = [_problem_cells(one, compared.samples) for one in changed]
        parts.append(f"## {len(rows)} problems that only the {which} solves in most samples")
        if rows:
            parts.append(_table(("problem", "source", "first", "second", "statement"), rows[:most]))
        if most is not None and len(rows) > most:
            parts.append(f"and {len(rows) - most} more")
    return "\n\n".join(parts) + "\n"


def _score_cells(score: ScorePair) -> list[str]:
    intervals = (score.difference.samples, score.difference.problems)
    return [
        score.name,
        f"{100 * score.first:.1f}%",
        f"{100 * score.second:.1f}%",
        f"{100 * score.difference.value:+.1f}",
        *(f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}" for interval in intervals),
    ]


def _problem_cells(changed: ChangedProblem, samples: int) -> list[str]:
    problem, excerpt = changed.problem, " ".join(changed.problem["prompt"].split())[:_EXCERPT_CHARS]
    return [problem["id"], problem["source"], f"{changed.first}/{samples}", f"{changed.second}/{samples}", excerpt]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Return text that Markdown shows as ``text``."""
    return "".join(f"\\{letter}" if letter in "\\`*_|<>[]$" else letter for letter in text)


def _read(folder: Path) -> FinishedEvaluation:
    """Read a folder, without keeping responses. Raises EvaluationError unless all problems have all samples."""
    if not (folder / RESULTS).is_file():
        begun = (folder / RESPONSES).is_file()
        state = "is not finished: run its command again" if begun else "holds no evaluation"
        raise EvaluationError(f"{folder} {state}; expected {RESULTS} and {RESPONSES}, as or1 eval --out writes them")
    try:
        results = json.loads((folder / RESULTS).read_text())
        k, count, _ = int(results["outcome"]["samples"]), int(results["outcome"]["problems"]), results["model"]
        if min(k, count) < 1:
            raise ValueError(f"{k} samples of {count} problems")
        problems: dict[str, AskedProblem] = {}
        rewards: dict[tuple[str, int], float] = {}
        for row in read_rows(folder / RESPONSES):
            identity, sample, right = str(row["problem_id"]), row["sample"], float(row["status"] == "right")
            if 0 <= sample < k:
                asked = {name: str(row[name]) for name in ("source", "ground_truth", "prompt")}
                problems[identity] = {"id": identity, **asked}
                rewards[identity, sample] = right
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise EvaluationError(
            f"{folder}: {RESULTS} or {RESPONSES} cannot be read ({type(error).__name__}: {error}); expected those of "
            "or1 eval"
        ) from None
    if len(problems) != count or len(rewards) != count * k:
        raise EvaluationError(
            f"{folder} is not finished: {len(rewards)} responses to {len(problems)} problems, expected {count * k} to "
            f"{count}; run its command again"
        )
    order = sorted(problems)
    table = np.array([[rewards[identity, sample] for sample in range(k)] for identity in order], dtype=np.float64)
    return FinishedEvaluation(folder, results, [problems[identity] for identity in order], table)


def _differences(one: FinishedEvaluation, two: FinishedEvaluation) -> list[str]:
    """Return why the two cannot be compared."""
    faults = []
    if one.rewards.shape[1] != two.rewards.shape[1]:
        faults.append(
            f"{one.folder} has {one.rewards.shape[1]} samples per problem and {two.folder} {two.rewards.shape[1]}; "
            "expected as many: add samples to the one with fewer (--k)"
        )
    ours, theirs = ({problem["id"]: problem for problem in side.problems} for side in (one, two))
    for here, mine, there, others in ((one, ours, two, theirs), (two, theirs, one, ours)):
        if only := sorted(mine.keys() - others.keys()):
            faults.append(f"{len(only)} problems of {here.folder} are not in {there.folder}: {_named(only, mine)}")
    both = sorted(ours.keys() & theirs.keys())
    if other := [key for key in both if ours[key]["ground_truth"] != theirs[key]["ground_truth"]]:
        faults.append(f"{len(other)} problems have other ground truths in the two: {_named(other, ours)}")
    return faults


def _named(ids: Sequence[str], problems: Mapping[str, AskedProblem]) -> str:
    shown = [f"{identity} ({' '.join(problems[identity]['prompt'].split())[:60]})" for identity in ids[:_NAMED]]
    return "; ".join(shown) + (f"; and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
