"""Validates data rows in our own two column layouts, and defines the errors for a bad row.

The layout of Skywork-OR1-RL-Data (docs/schemas.md) and verl has ``data_source``, ``prompt`` [{role, content}],
``ability``, ``reward_model`` {ground_truth: string, style}, ``extra_info`` {model_difficulty}. A math ground truth is
the JSON of a list of answers, or one plain answer. The plain layout has ``prompt`` (string or messages) and ``answer``,
``label`` or ``ground_truth``. Other keys are ignored. An integer may be a float, as pandas writes a column with gaps;
NaN means no value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from or1_verify.errors import UserError
from or1_verify.types import Message

NonEmpty = Annotated[str, Field(min_length=1)]

DIFFICULTY_TRIES = 16
"""Number of tries in which ``model_difficulty`` counts failures (docs/recipe.md, section 7)."""

ANSWERS = ("answer", "label", "ground_truth")
"""Names of the column that holds the answer in the plain layout."""
MISSING = ("nan", "none", "null", "n/a", "inf", "-inf", "<na>", "proof", "notfound")
"""Texts (in lower case) that mean that there is no answer; the last two are NuminaMath-1.5's."""
_PICTURE = re.compile(r"(decoded_)?(image|video)s?(_path|_\d+)?")
_SHOWN_CHARS = 120


class DataError(UserError, ValueError):
    """A problem file cannot be used. The message names file:line, the field, what was found and what was expected."""


class RowError(DataError):
    """One data row cannot be used. ``reason`` is a short text, equal for all rows with the same fault, for counting."""

    def __init__(self, origin: str, reason: str, detail: str) -> None:
        super().__init__(f"{origin}: {detail}")
        self.origin, self.reason, self._detail = origin, reason, detail

    def at(self, origin: str) -> RowError:
        """Return the same error for another data row."""
        return RowError(origin, self.reason, self._detail)


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The fields of a data row in either of our layouts. ``source`` is None if a plain row names none."""

    source: str | None
    messages: tuple[Message, ...]
    ability: str
    ground_truth: str
    difficulty: Mapping[str, int]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("expected text, found white space alone")
    return text


Text = Annotated[NonEmpty, AfterValidator(_not_blank)]


def _whole(value: Any) -> Any:
    """Return a whole float as an integer (pandas writes integers as floats), NaN as None, other values unchanged."""
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value


Ability = Annotated[NonEmpty, StringConstraints(to_lower=True)]
"""Name of an ability, turned to lower case (DAPO's data has MATH)."""


class _MessageRow(_StrictModel):
    role: NonEmpty
    content: Text


def _turns(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


_Prompt = Annotated[list[_MessageRow], Field(min_length=1), BeforeValidator(_turns)]


def _text(value: Any) -> Any:
    """Return a number as text, a list or object as JSON, and other values unchanged."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    value = _whole(value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class _RewardModel(_StrictModel):
    ground_truth: Annotated[NonEmpty, BeforeValidator(_text)]
    style: str = "rule"


class _ExtraInfo(_StrictModel):
    model_difficulty: (
        dict[str, Annotated[Annotated[int, Field(ge=0, le=DIFFICULTY_TRIES)] | None, BeforeValidator(_whole)]] | None
    ) = None
    """Failures in 16 tries, by model; Parquet files have null for a model that was not measured."""


class _SkyworkRow(_StrictModel):
    data_source: str | None = None
    prompt: _Prompt
    ability: Ability
    reward_model: _RewardModel
    extra_info: _ExtraInfo | None = None

    def parsed(self, origin: str) -> ParsedRow:
        measured = (self.extra_info and self.extra_info.model_difficulty) or {}
        difficulty = {model: failures for model, failures in measured.items() if failures is not None}
        truth = _listed(self.reward_model.ground_truth) if self.ability == "math" else self.reward_model.ground_truth
        return ParsedRow(self.data_source or None, _messages(self.prompt), self.ability, truth, difficulty)


class _PlainRow(_StrictModel):
    prompt: _Prompt
    answer: Annotated[
        NonEmpty | int | Annotated[float, Field(allow_inf_nan=False)] | Annotated[list[NonEmpty], Field(min_length=1)],
        BeforeValidator(_whole),
    ]
    ability: Ability = "math"
    source: str | None = None

    def parsed(self, origin: str) -> ParsedRow:
        """Return the row's fields. For math, the ground truth is a JSON list of answers; otherwise, text or JSON."""
        if self.ability == "math":
            answers = self.answer if isinstance(self.answer, list) else [str(self.answer)]
            if missing := [answer for answer in answers if answer.strip().lower() in MISSING]:
                detail = f"field 'answer': {missing[0]!r} says that there is no answer"
                raise RowError(origin, "no answer", detail)
            truth = json.dumps(answers, ensure_ascii=False)
        else:
            truth = _text(self.answer)
        return ParsedRow(self.source or None, _messages(self.prompt), self.ability, truth, {})


def parse_row(raw: dict[str, Any], origin: str) -> ParsedRow:
    """Validate one decoded row in either of our layouts, and return its fields. Raises RowError."""
    check_no_image(raw, origin)
    answer = next((name for name in ANSWERS if name in raw), "")
    plain = bool(answer) and "reward_model" not in raw
    if plain and _whole(raw[answer]) is None:
        raise RowError(origin, "no answer", f"field '{answer}': found {shown(raw[answer])}, expected an answer")
    try:
        row = _PlainRow.model_validate(raw | {"answer": raw[answer]}) if plain else _SkyworkRow.model_validate(raw)
    except ValidationError as error:
        raise _explained(error, origin) from None
    return row.parsed(origin)


def check_no_image(raw: Mapping[str, Any], origin: str) -> None:
    """Raise RowError if a data row has a picture, which the model would not see."""
    for name in raw:
        if raw[name] and _PICTURE.fullmatch(name):
            detail = f"column '{name}': the problem has a picture, which the model would not see"
            raise RowError(origin, "the problem has a picture", detail)


def published_row(
    source: str, messages: Sequence[Message], ability: str, ground_truth: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a data row with the columns of Skywork-OR1-RL-Data, as ``parse_row`` reads them."""
    return {
        "data_source": source,
        "prompt": [{"role": message.role, "content": message.content} for message in messages],
        "ability": ability,
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": dict(extra),
    }


def _listed(answer: str) -> str:
    """Return the JSON of a list with one item, the plain answer that a math row has, such as 204 or 336^\\circ.

    An answer that begins like a list or an object, or is a word for a missing value, is returned unchanged.
    """
    text = answer.strip()
    if text[:1] in ("", "[", "{") or text.lower() in (*MISSING, "true", "false"):
        return answer
    if text.startswith('"'):
        try:
            text = json.loads(text)
        except ValueError:
            return answer
    return json.dumps([text], ensure_ascii=False)


def _messages(rows: Sequence[_MessageRow]) -> tuple[Message, ...]:
    return tuple(Message(row.role, row.content) for row in rows)


def _explained(error: ValidationError, origin: str) -> RowError:
    errors = error.errors(include_url=False)
    complaints = []
    for item in errors:
        value = "" if item["type"] == "missing" else f", found {shown(item['input'])}"
        complaints.append(f"field '{'.'.join(str(part) for part in item['loc'])}': {item['msg']}{value}")
    text = "; ".join(complaints)
    first = next((item for item in errors if item["type"] == "missing"), errors[0])
    fault = "is missing" if first["type"] == "missing" else "has a wrong type or value"
    return RowError(origin, f"field '{first['loc'][0]}' {fault}", text)


def shown(value: Any) -> str:
    """Return a value for an error message: its repr, cut to 120 characters, and its type."""
    text = repr(value)
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    return f"{text} ({type(value).__name__})"


def parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file:row, row) for each row of a Parquet file, from row 1. Raises DataError if the file is unreadable."""
    try:  # here: most files are JSONL, pyarrow takes a while to import, and it is not a dependency of or1_verify
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path}: a Parquet file needs the package pyarrow: pip install pyarrow") from None

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for raw in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", raw
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file (after row {number}): {error}") from None
