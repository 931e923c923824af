"""Explains each configuration key: the text of ``or1 config --explain`` and of docs/config.md.

    python -m or1_megatron.config.explain > docs/config.md

A key's text is the docstring of its attribute in the schema. ``Unit: ...`` and ``Recipe: ...``, if given, end it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from or1_megatron.config.base import ConfigError
from or1_megatron.config.keys import Key, did_you_mean, keys_of
from or1_megatron.config.removed import why_removed
from or1_megatron.config.resume import NEXT_STAGE_CHANGES, NOT_RESUMABLE, RESUMABLE_CHANGES, matches
from or1_megatron.config.schema import Config

_UNITS: Final = {"s": "seconds", "bytes": "bytes", "tokens": "tokens", "steps": "rollout steps"}
"""A key's unit by the last word of the key's name, for keys whose docstring names no unit."""

HEADING: Final = """\
# Configuration keys

Generated from the schema by `python -m or1_megatron.config.explain`. `or1 config --explain KEY` prints the same of one key or
section.

N stands for a place in a list, from 0. "May change" says where a key may have another value than before: when a run is resumed, or
in the next stage, trained in a run of its own. "Recipe" is what the report (arXiv 2505.22312) or its released code says; without
it the default is ours.
"""  # noqa: E501


def explain(wanted: str | None = None) -> str:
    """Return the explanation of a key, of a section's keys, or (None) of all keys, as Markdown.

    Args:
        wanted: a dotted key or section, or its last parts: ``optimizer.lr``, ``stages.0.steps``, ``loss``.

    Raises:
        ConfigError: there is no such key; the message names the nearest known keys.
    """
    keys = list(keys_of(Config))
    plain = [key for key in keys if key.section is None]
    if wanted is not None:
        bare = ".".join(part for part in wanted.split(".") if not part.isdecimal() and part not in ("N", "*"))
        plain = [key for key in plain if f".{bare}." in f".{_bare(key)}."]
        if not plain:
            near = did_you_mean(bare, map(_bare, keys)) or did_you_mean(bare, (key.path[-1] for key in keys))
            raise ConfigError(f"{wanted}: {why_removed(bare.split('.')) or f'unknown key{near}'}")
    return "\n".join(_by_section(plain, {key.path: key for key in keys})).strip()


def _bare(key: Key) -> str:
    return ".".join(part for part in key.path if part != "*")


def _by_section(plain: Iterable[Key], keys: Mapping[tuple[str, ...], Key]) -> Iterator[str]:
    sections: dict[tuple[str, ...], list[Key]] = {path[:-1]: [] for path in keys}
    for key in plain:
        sections[key.path[:-1]].append(key)
    for path, members in sections.items():
        if members:
            yield f"## {_shown(path)}\n"
            yield f"{inspect.cleandoc(members[0].owner.__doc__ or '')}\n"
            for key in members:
                yield "\n".join(_entry(key))
            yield ""


def _shown(path: tuple[str, ...]) -> str:
    return ".".join("N" if part == "*" else part for part in path)


def _entry(key: Key) -> Iterator[str]:
    """Yield the Markdown lines that explain one key."""
    text, unit, recipe = _document(key)
    kind = _kind(key.owner.model_json_schema()["properties"][key.path[-1]])
    if re.match(r"(list of )?(integer|number)", kind):
        unit = unit or _UNITS.get(re.split(r"[._]", key.path[-1])[-1], "")
    yield f"- `{_shown(key.path)}`: {text}"
    yield f"  - {kind}{f'; unit: {unit}' if unit else ''}; {_default(key)}"
    yield f"  - may change: {_changes(key)}"
    if recipe:
        yield f"  - recipe: {recipe}"


def _changes(key: Key) -> str:
    if matches(key.name, RESUMABLE_CHANGES) and not matches(key.name, NOT_RESUMABLE):
        return "on resume and in the next stage"
    return "in the next stage" if matches(key.name, (*NEXT_STAGE_CHANGES, "stages.*")) else "never"


def _document(key: Key) -> tuple[str, str, str]:
    """Return (text, unit, recipe) of a key's docstring; a part that is absent is ""."""
    text, _, recipe = " ".join((key.field.description or "").split()).partition(" Recipe: ")
    text, _, unit = text.partition(" Unit: ")
    return text, unit.rstrip("."), recipe


def _kind(schema: Mapping[str, Any]) -> str:
    """Return in words which values a JSON schema allows, such as ``integer above 0``."""
    match schema:
        case {"anyOf": choices}:
            return " or ".join(_kind(choice) for choice in choices if choice.get("type") != "null")
        case {"enum": values}:
            return "one of " + ", ".join(map(str, values))
        case {"type": "array", "items": items}:
            return f"list of {_kind(items)}"
        case {"type": "object", "additionalProperties": True}:
            return "mapping"
        case {"type": "object", "additionalProperties": values}:
            return f"mapping of names to {_kind(values)}"
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "string"}:
            return "path" if schema.get("format") == "path" else "string"
    bounds = {
        "exclusiveMinimum": "above {}",
        "minimum": "{} or more",
        "exclusiveMaximum": "below {}",
        "maximum": "at most {}",
    }
    said = [text.format(f"{schema[name]:g}") for name, text in bounds.items() if name in schema]
    return " ".join((schema["type"], ", ".join(said))).strip()


def _default(key: Key) -> str:
    if key.field.is_required():
        return "required"
    value = key.field.get_default(call_default_factory=True)
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"default: {value} ({value >> 20} MiB)"
    return "default: " + ("unset" if value is None else json.dumps(value))


if __name__ == "__main__":
    print(HEADING)
    print(explain())
