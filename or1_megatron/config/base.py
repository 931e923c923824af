"""The base class of all configuration sections, which refuses unknown keys. Also number types and ConfigError."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from or1_verify.errors import UserError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
AboveOne = Annotated[float, Field(gt=1)]


class Section(BaseModel):
    """Base class of all configuration sections: immutable, and strict about names and types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _home_is_found(cls, value: Any) -> Any:
        """Return a path with ``~`` or ``~user`` at its start replaced by the home folder, as in a shell."""
        if not isinstance(value, Path):
            return value
        try:
            return value.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{value}: {error}") from None


def refuse_idle(section: Section, name: str, keys: Iterable[str], why: str) -> None:
    """Raise ValueError ("KEY = X has no effect WHY") for the first of ``keys`` whose value is not its default."""
    for key in keys:
        value = getattr(section, key)
        if value != type(section).model_fields[key].default:
            shown = value if isinstance(value, str) else f"{value:g}"
            raise ValueError(f"{name}: {key} = {shown} has no effect {why}, or take {key} out")


class ConfigError(UserError, ValueError):
    """A configuration cannot be used; the message names file and key, what was found and what was expected."""


class DataFileMissing(ConfigError):
    """A problem file that the configuration names does not exist."""


def as_annotated(kind: type[Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (values in the types of the class's annotations, errors "KEY: found X, expected Y").

    ``values`` come from YAML or JSON: a list becomes a tuple where a tuple is annotated. An annotation that cannot be
    evaluated, or that pydantic does not know, allows any value, because the class may be a user's own.
    """
    typed: dict[str, Any] = dict(values)
    wrong: list[str] = []
    try:
        hints = get_type_hints(kind)
    except Exception:
        return typed, wrong
    for key in (key for key in values if key in hints):
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[key], config={"allow_inf_nan": False})
            typed[key] = adapter.validate_json(json.dumps(values[key]), strict=True)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].removeprefix("Input should be ")
            wrong.append(f"{key}: found {values[key]!r}, expected {expected}")
        except Exception:
            continue
    return typed, wrong
