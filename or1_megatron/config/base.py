"""The base of all sections, their number types, and ConfigError."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from or1_megatron.errors import UserError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]


class Section(BaseModel):
    """Base of all sections: immutable, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used; the message names file and key, what was found and what was expected."""


class DataFileMissing(ConfigError):
    """A file of problems that the configuration names is not there."""
