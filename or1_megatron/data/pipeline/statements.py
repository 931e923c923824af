"""Excludes problems by their statements: proofs, missing choices, links, figures, problems without an answer."""

from __future__ import annotations

import json
import re
from typing import Any

from or1_megatron.config.schema import Section
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.steps import PipelineStep

_SENTENCE = r"(?:^|[.!?;:)\n]\s*(?:\(?[a-z0-9]{1,3}[.)]\s*)?)"  # also behind "(a)" or "2."
_PROVE = re.compile(
    _SENTENCE + r"\s*(?:please |then |hence |now )?(?:prove|show|demonstrate|verify)\b(?! (?:your|all|the) work)", re.I
)
_ASKS = re.compile(
    r"\b(?:find|determine|compute|calculate|evaluate|solve|how (?:many|much|long|far|old|often)|what|which|who|when)\b"
    r"|\?",
    re.I,
)
_NO_ANSWER = frozenset({"", "notfound", "not found", "none", "n/a", "null", "unknown"})
_CHOOSES = re.compile(
    r"which (?:one )?of the following|which of (?:these|the (?:options|choices|answers))|(?:the|which) (?:correct )?"
    r"(?:option|choice)s? (?:is|are|below)|choose the (?:correct|right|best)|select the (?:correct|right|best)",
    re.I,
)
_LETTER = re.compile(r"\(?\\?(?:text(?:bf)?\{)?\(?([A-E])\)?\}?\)?\.?")
_OPTION = re.compile(
    r"(?:^|[\s({}$~\\])\(?([A-E])\s*[).:]\s*\}?|\\text(?:bf)?\{\s*\(?([A-E])[).]?\s*\)?\}?|\(([A-E])\)"
)
_LINK = re.compile(r"https?://\S+|\bwww\.\S+", re.I)
_FIGURE = re.compile(
    r"!\[[^\]]*\]|\\includegraphics|<img\b|\[asy\]|\[img\]"
    r"|\b(?:in|see|from|to|on|of) (?:the )?(?:figure|fig\.|diagram|picture|drawing|image|graph|sketch) "
    r"?(?:\d|above|below|shown|here|on the (?:right|left))"
    r"|\b(?:figure|fig\.|diagram|picture|drawing|image) (?:above|below|shown|on the (?:right|left)|shows)"
    r"|\bas (?:shown|pictured|illustrated|depicted)\b|\bshown (?:above|below|in the)\b|\bpictured (?:above|below)\b",
    re.I,
)
_MIN_CHARS = 12  # shorter statements are incomplete
_SHOWN_CHARS = 120


class Statements(PipelineStep[Section]):
    """Excludes problems whose statement cannot be trained on (see ``_fault``)."""

    name = "statements"

    def __init__(self) -> None:
        super().__init__(Section())

    def decide(self, row: Candidate, number: int) -> Outcome:
        return row if (fault := _fault(row)) is None else Exclusion(row, *fault)


def _fault(row: Candidate) -> tuple[str, dict[str, Any]] | None:
    """Return (reason, evidence) for excluding a problem; None for a problem that stays."""
    text = row.statement
    if len(text) < _MIN_CHARS:
        return "statement_too_short", {"chars": len(text), "expected_at_least": _MIN_CHARS}
    if row.ability != "math":
        return ("figure", {"pictures": row.notes["pictures"]}) if row.notes.get("pictures") else None
    answer, kind = _only_answer(row.ground_truth), str(row.notes.get("question_type", ""))
    if kind == "proof" or answer.lower() == "proof":
        return "proof", {"question_type": kind, "answer": answer}
    if (asked := _PROVE.search(text)) and not _ASKS.search(text, asked.end()):
        return "proof", {"found": _around(text, asked)}
    if answer.lower() in _NO_ANSWER:
        return "no_answer", {"answer": answer}
    if figure := _FIGURE.search(text):
        return "figure", {"found": _around(text, figure)}
    if link := _LINK.search(text):
        return "link", {"found": _around(text, link)}
    if (why := _chooses(text, answer, kind)) and len(_options(text)) < 2:
        return "choices_missing", {"found": why, "options": sorted(_options(text))}
    return None


def _only_answer(ground_truth: str) -> str:
    """Return the answer in a ground truth that is a JSON list with one item; else the ground truth unchanged."""
    if not ground_truth:
        return ""
    try:
        golds = json.loads(ground_truth)
    except ValueError:
        return ground_truth
    return str(golds[0]).strip() if isinstance(golds, list) and len(golds) == 1 else ground_truth


def _chooses(text: str, answer: str, kind: str) -> str:
    """Return the evidence that a problem is multiple choice (words of its text, its type or its answer); else ""."""
    if kind == "MCQ":
        return "question_type MCQ"
    if chosen := _CHOOSES.search(text):
        return _around(text, chosen)
    return f"the answer {answer}" if _LETTER.fullmatch(answer) and answer.strip("().") in "ABCDE" else ""


def _options(text: str) -> frozenset[str]:
    return frozenset(next(filter(None, groups)) for groups in _OPTION.findall(text) if any(groups))


def _around(text: str, match: re.Match[str]) -> str:
    start = max(0, match.start() - 20)
    return " ".join(text[start : start + _SHOWN_CHARS].split())
