"""From YAML files and overrides to a Config, and back.

    base: recipe.yaml           # optional; relative to this file; chains; this file's values win; lists replace
    run: {dir: "${RUNS:-runs}/mine"}
    optimizer: {lr: 1e-6}

``${VAR}`` and ``${VAR:-default}`` in a value are replaced from the environment; ``$${`` stands for a literal ``${``. An
unquoted value is read as YAML again after that, so ``steps: ${STEPS}`` may be a number. Relative paths (data, model,
run folder) are relative to the working directory, not to the file: one config serves every place it is run from.

Types are strict: ``"3"`` and ``true`` are not integers, ``3`` is not a string.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from or1_megatron.config.schema import Config
from or1_megatron.config.yaml_reader import Origins, YamlError, dump, read_file, read_value
from or1_megatron.errors import UserError

RESUMABLE_CHANGES: Final[tuple[str, ...]] = (
    # Where things are and how long the run goes on.
    "run.dir",
    "run.previous",  # its checkpoint has been read
    "stages.*.steps",
    "data.unusable",  # where both start, they give the same problems; the data's fingerprint is compared anyway
    # How the work is spread: any layout loads any other's checkpoint, and the loss does not depend on the cut.
    "parallel.*",
    "rollout.*",
    "handoff.*",
    "cluster.*",
    # Limits of the verifiers: a time-out is counted apart from a wrong answer.
    "verify.*",
    # What is watched and kept. Not the evaluation's data and sampling: the best checkpoint is chosen by them.
    "evaluate.every_steps",
    "evaluate.samples_during",
    "checkpoint.*",
    "safety.*",
    "track.*",
)
"""Dotted keys (``*``: any part) that a resumed run may have otherwise than the run it resumes. All else must agree."""

NOT_RESUMABLE: Final[tuple[str, ...]] = ("rollout.max_staleness",)
"""Exceptions to RESUMABLE_CHANGES: what the run comes to depends on them."""

NEXT_STAGE_CHANGES: Final[tuple[str, ...]] = (
    *RESUMABLE_CHANGES,
    "run.stage",
    "algorithm.*",
    "optimizer.*",
    "evaluate.*",
)
"""What a stage that begins in a run of its own may have otherwise than the run of the stage before, beside its own
entry in ``stages`` and later ones. Not the model, the data and the seed: the data's cursor goes on."""

_ABSENT: Final = "absent"
_EXPECTED: Final = {
    "model_type": "a mapping",
    "tuple_type": "a list",
    "too_short": "at least one item",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string (put it in quotes)",
    "path_type": "a path (put it in quotes)",
}
"""pydantic's error types in YAML's words."""


Schema = TypeVar("Schema", bound=BaseModel)


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used; the message names file and key, what was found and what was expected."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, its bases, then ``overrides`` (``a.b=value``, value in YAML; ``stages.0.steps=3`` indexes a list).

    Raises:
        ConfigError: all that is wrong with keys and values, one line each, naming file:line and the dotted key.
    """
    return load_as(Config, path, overrides)


def load_as(schema: type[Schema], path: Path | None, overrides: Sequence[str] = ()) -> Schema:
    """As ``load_config``, for a file of another schema; None: its defaults and the overrides."""
    try:
        data, origins = ({}, {}) if path is None else _read_with_bases(Path(path), ())
        for override in overrides:
            _override(data, origins, override)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    try:
        return schema.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        found = error.errors()
        # A list whose items are wrong is called too short as well; the items' own errors say it better.
        outer = {details["loc"][:n] for details in found for n in range(1, len(details["loc"]))}
        lines = [_explain(details, origins, str(path), schema) for details in found if details["loc"] not in outer]
        raise ConfigError("\n".join(lines)) from None


def resolved_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as YAML that ``load_config`` reads back equal."""
    return dump(config.model_dump(mode="json"))


def value_of(config: Config, key: str) -> str:
    """The value of one dotted key: a plain one as it is, a section or list as YAML.

    Raises:
        ConfigError: there is no such key.
    """
    value: Any = config.model_dump(mode="json")
    parts = key.split(".")
    for depth, part in enumerate(parts):
        inside = isinstance(value, dict) and part in value
        if not inside and not (isinstance(value, list) and part.isdecimal() and int(part) < len(value)):
            raise ConfigError(f"{key}: unknown key{_nearest(tuple(parts[: depth + 1]), Config)}")
        value = value[part] if inside else value[int(part)]
    return dump(value).rstrip() if isinstance(value, dict | list) else "" if value is None else str(value)


def check_resume(old: Config, new: Config) -> None:
    """Refuse to resume a run of ``old`` as ``new`` where they differ in more than RESUMABLE_CHANGES.

    Raises:
        ConfigError: a line for each such key with its old and new value.
    """
    by_cut = old.algorithm.loss.aggregation == "micro_batch_mean"  # the one loss that depends on the layout
    forbidden = (*NOT_RESUMABLE, *(("parallel.*",) if by_cut else ()))
    if changed := _changed(old, new, RESUMABLE_CHANGES, forbidden):
        raise ConfigError(
            f"run {new.run.folder} cannot be resumed with another configuration; put these back, "
            "or start a new run with --set run.dir=...:\n" + "\n".join(changed)
        )


def check_next_stage(old: Config, new: Config, checkpoint: Path) -> None:
    """Refuse to begin stage ``new.run.stage`` from ``checkpoint``, of a run of ``old``.

    Raises:
        ConfigError: a line for each key that differs and is neither in NEXT_STAGE_CHANGES nor of a later stage.
    """
    assert new.run.stage is not None
    later = [f"stages.{index}.*" for index in range(new.run.stage - 1, max(len(old.stages), len(new.stages)))]
    if changed := _changed(old, new, (*NEXT_STAGE_CHANGES, *later), ()):
        raise ConfigError(
            f"stage {new.run.stage} cannot begin from {checkpoint} with another configuration in what a new stage does "
            "not change; put these back:\n" + "\n".join(changed)
        )


def _changed(old: Config, new: Config, allowed: Sequence[str], forbidden: Sequence[str]) -> list[str]:
    before, after = _flat(old), _flat(new)

    def may_change(key: str) -> bool:
        is_allowed = any(fnmatch.fnmatchcase(key, pattern) for pattern in allowed)
        return is_allowed and not any(fnmatch.fnmatchcase(key, pattern) for pattern in forbidden)

    return [
        f"  {key}: was {before.get(key, _ABSENT)}, now {after.get(key, _ABSENT)}"
        for key in dict.fromkeys((*before, *after))
        if before.get(key, _ABSENT) != after.get(key, _ABSENT) and not may_change(key)
    ]


def _flat(config: Config) -> dict[str, str]:
    """Dotted key to JSON text of every leaf; an empty list or mapping is a leaf."""

    def leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if not items or not value:
            yield key, json.dumps(value)
        else:
            for name, child in items:
                yield from leaves(child, f"{key}.{name}" if key else str(name))

    return dict(leaves(config.model_dump(mode="json"), ""))


def _read_with_bases(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], Origins]:
    """``path`` laid over its bases. ``above`` are the files that led here, to see a cycle."""
    if path.resolve() in above:
        chain = " -> ".join(str(file) for file in (*above, path.resolve()))
        raise ConfigError(f"{path}: 'base' leads back to itself: {chain}")
    data, origins = read_file(path)
    base = data.pop("base", None)
    if base is None:
        return data, origins
    if not isinstance(base, str):
        raise ConfigError(f"{origins[('base',)]}: base: found {_shown(base)}, expected one file name")
    if not (path.parent / base).is_file():
        raise ConfigError(f"{origins[('base',)]}: base: no such file: {path.parent / base} (relative to {path})")
    below, below_origins = _read_with_bases(path.parent / base, (*above, path.resolve()))
    _lay_over(below, data, below_origins, origins, ())
    return below, below_origins


def _lay_over(
    below: dict[str, Any], over: Mapping[str, Any], below_origins: Origins, origins: Origins, key: tuple[str, ...]
) -> None:
    """Merge ``over`` into ``below`` in place: mappings key by key, everything else replaced."""
    for name, value in over.items():
        child = (*key, name)
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _lay_over(below[name], value, below_origins, origins, child)
        else:
            below[name] = value
            for stale in [k for k in below_origins if k[: len(child)] == child]:
                del below_origins[stale]
            below_origins.update({k: v for k, v in origins.items() if k[: len(child)] == child})


def _override(data: dict[str, Any], origins: Origins, override: str) -> None:
    """Apply one ``a.b=value`` in place."""
    dotted, equals, text = override.partition("=")
    parts = tuple(dotted.strip().split("."))
    where = f"--set {override}"
    if not equals or not all(parts):
        raise ConfigError(f"{where}: expected key.subkey=value")
    value = read_value(text, where)
    at: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(at, dict):
            at = at.setdefault(part, {})
        else:
            at = at[_list_index(at, part, ".".join(parts[:depth]), where)]
    if isinstance(at, dict):
        at[parts[-1]] = value
    else:
        at[_list_index(at, parts[-1], ".".join(parts[:-1]), where)] = value
    origins[parts] = where
    for depth in range(1, len(parts)):
        origins.setdefault(parts[:depth], where)


def _list_index(at: Any, part: str, parent: str, where: str) -> int:
    if not isinstance(at, list):
        raise ConfigError(f"{where}: {parent} is {_shown(at)}; it has nothing below it to set")
    if not part.isdecimal() or int(part) >= len(at):
        raise ConfigError(f"{where}: {parent} is a list of {len(at)}; expected an index from 0 to {len(at) - 1}")
    return int(part)


def _explain(details: ErrorDetails, origins: Origins, path: str, schema: type[BaseModel]) -> str:
    """One validation error as ``file:line: dotted.key: found ..., expected ...``."""
    parts = tuple(str(part) for part in details["loc"])
    key = ".".join(parts)
    known_above = next((origins[parts[:n]] for n in range(len(parts), 0, -1) if parts[:n] in origins), path)
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"{known_above}: {key}: unknown key{_nearest(parts, schema)}"
    if kind == "missing":
        return f"{known_above}: {key}: missing; it has no default"
    if kind == "value_error":
        return f"{known_above}: {details['msg'].removeprefix('Value error, ')}"
    expected = _EXPECTED.get(kind) or details["msg"].removeprefix("Input should be ")
    return f"{known_above}: {key}: found {_shown(details['input'])}, expected {expected}"


def _shown(value: Any) -> str:
    """A value with its type in YAML's words, cut to a line."""
    names = {bool: "true/false", int: "integer", float: "number", str: "string", list: "list", dict: "mapping"}
    text = json.dumps(value)
    if value is None:
        return "nothing (null)"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({names.get(type(value), type(value).__name__)})"


def _nearest(parts: tuple[str, ...], schema: type[BaseModel]) -> str:
    """``; did you mean a.b?`` for the known key nearest to an unknown one: a sibling first, then from any section."""
    known = dict.fromkeys(_keys(schema, ()))
    shape = tuple("*" if part.isdecimal() else part for part in parts)
    siblings = [key for key in known if key[:-1] == shape[:-1]]
    close = difflib.get_close_matches(parts[-1], [key[-1] for key in siblings], n=1, cutoff=0.5)
    if close:
        return f"; did you mean {'.'.join((*parts[:-1], close[0]))}?"
    elsewhere = {key[-1]: key for key in known}
    if found := difflib.get_close_matches(parts[-1], elsewhere, n=1, cutoff=0.8):
        return f"; did you mean {'.'.join(elsewhere[found[0]])}?"
    return f"; known here: {', '.join(key[-1] for key in siblings)}"


def _keys(section: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every key of the schema, parents before children, with ``*`` for a place in a list."""
    for name, field in section.model_fields.items():
        key = (*above, name)
        yield key
        inner, in_list = _section_of(field.annotation)
        if inner is not None:
            yield from _keys(inner, (*key, "*") if in_list else key)


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field's type is, or is a tuple of; (None, False) for a plain value."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return (annotation, False) if issubclass(annotation, BaseModel) else (None, False)
    for argument in typing.get_args(annotation):
        inner, _ = _section_of(argument)
        if inner is not None:
            return inner, typing.get_origin(annotation) is tuple
    return None, False
