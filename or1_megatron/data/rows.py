"""The two row schemas that problem files may have, and the error that names a bad row.

Skywork-OR1-RL-Data (docs/schemas.md): ``data_source``, ``prompt`` [{role, content}], ``ability``, ``reward_model``
{ground_truth: string, style}, ``extra_info`` {index, model_difficulty}. Plain: ``prompt`` (string or messages) and
``answer``. Keys beyond these are ignored; what is named must be there with the right type (nothing is coerced).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from or1_megatron.errors import UserError
from or1_megatron.types import Message

NonEmpty = Annotated[str, Field(min_length=1)]

_SKYWORK_KEYS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
_SHOWN_CHARS = 120


class DataError(UserError, ValueError):
    """A problem file cannot be used. The message names file:line, the field, what was found and what was expected."""


class Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class MessageRow(Row):
    role: NonEmpty
    content: NonEmpty


class RewardModel(Row):
    ground_truth: NonEmpty
    style: str = "rule"


class ExtraInfo(Row):
    index: int | str | None = None
    model_difficulty: dict[str, int | None] | None = None
    """Failures in 16 tries per model; parquet writes an unmeasured model as null."""


class SkyworkRow(Row):
    data_source: NonEmpty
    prompt: list[MessageRow] = Field(min_length=1)
    ability: NonEmpty
    reward_model: RewardModel
    extra_info: ExtraInfo


class PlainRow(Row):
    prompt: NonEmpty | Annotated[list[MessageRow], Field(min_length=1)]
    answer: NonEmpty | int | float | Annotated[list[NonEmpty], Field(min_length=1)]
    ability: NonEmpty = "math"
    source: NonEmpty | None = None

    def messages(self) -> list[MessageRow]:
        return [MessageRow(role="user", content=self.prompt)] if isinstance(self.prompt, str) else self.prompt

    def ground_truth(self) -> str:
        """The answer as the reward model's string: a JSON list for math; a code answer is passed on as it stands."""
        if self.ability != "math":
            if not isinstance(self.answer, str):
                raise ValueError(f"answer of ability '{self.ability}': expected the ground truth's JSON as a string")
            return self.answer
        answers = self.answer if isinstance(self.answer, list) else [str(self.answer)]
        return json.dumps(answers, ensure_ascii=False)


def parse_row(raw: Any, origin: str) -> SkyworkRow | PlainRow:
    """Validate one decoded row; ``origin`` is ``file:line``. Raises DataError."""
    if not isinstance(raw, dict):
        raise DataError(f"{origin}: expected a JSON object with one problem, found {shown(raw)}")
    plain = "answer" in raw and "reward_model" not in raw
    try:
        return PlainRow.model_validate(raw) if plain else SkyworkRow.model_validate(raw)
    except ValidationError as error:
        raise DataError(_explain(error, raw, origin)) from None


def published_row(
    source: str, messages: Sequence[Message], ability: str, ground_truth: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """A row in the schema of Skywork-OR1-RL-Data, as ``parse_row`` reads it."""
    return {
        "data_source": source,
        "prompt": [{"role": message.role, "content": message.content} for message in messages],
        "ability": ability,
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": dict(extra),
    }


def _explain(error: ValidationError, raw: dict[str, Any], origin: str) -> str:
    complaints = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"])
        found = "" if item["type"] == "missing" else f", found {shown(item['input'])}"
        complaints.append(f"field '{field}': {item['msg']}{found}")
    text = f"{origin}: " + "; ".join(complaints)
    if "reward_model" not in raw and "answer" not in raw:
        text += f" (expected either {{{', '.join(_SKYWORK_KEYS)}}} or {{prompt, answer}}; this row has {sorted(raw)})"
    return text


def shown(value: Any) -> str:
    """A value as an error message shows it: its repr cut short, and its type."""
    text = repr(value)
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    return f"{text} ({type(value).__name__})"
