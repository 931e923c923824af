"""The dotted keys of a configuration schema; for an unknown key, the error text with the nearest known key."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from or1_megatron.config.removed import why_removed


@dataclass(frozen=True)
class Key:
    """One key of a configuration schema."""

    path: tuple[str, ...]
    """The key's parts; ``*`` stands for a list index."""
    field: FieldInfo
    owner: type[BaseModel]
    """The section class that declares the key."""
    section: type[BaseModel] | None
    """The section class of the key's value, or of the items of its list; None for a plain value."""

    @property
    def name(self) -> str:
        return ".".join(self.path)


def keys_of(schema: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yield every key of a schema, each section before its keys. ``above``: the path of the schema itself."""
    for name, field in schema.model_fields.items():
        section, in_list = _section_of(field.annotation)
        key = Key((*above, name), field, schema, section)
        yield key
        if section is not None:
            yield from keys_of(section, (*key.path, "*") if in_list else key.path)


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return (section class in a field's annotation or None, whether the field is a list of that section)."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return (annotation, False) if issubclass(annotation, BaseModel) else (None, False)
    for argument in typing.get_args(annotation):
        section, _ = _section_of(argument)
        if section is not None:
            return section, typing.get_origin(annotation) is tuple
    return None, False


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X or Y?`` with the known names nearest to ``name``; "" if no name is near."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def unknown_key(parts: tuple[str, ...], schema: type[BaseModel]) -> str:
    """Return why a schema does not have the key ``parts``: ``was removed: ...`` or ``unknown key; ...``.

    The text for an unknown key names the nearest key of the section, else of any section, else all keys of the section.
    """
    if (removed := why_removed(parts)) is not None:
        return removed
    known = [key.path for key in keys_of(schema)]
    above = tuple("*" if part.isdecimal() else part for part in parts[:-1])
    siblings = {key[-1]: ".".join((*parts[:-1], key[-1])) for key in known if key[:-1] == above}
    elsewhere = {key[-1]: ".".join(key) for key in known}
    for names, cutoff in ((siblings, 0.5), (elsewhere, 0.8)):
        if close := difflib.get_close_matches(parts[-1], names, n=1, cutoff=cutoff):
            return f"unknown key; did you mean {names[close[0]]}?"
    return f"unknown key; known here: {', '.join(siblings)}"
