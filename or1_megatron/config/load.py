"""Loads a configuration from YAML files, their ``base`` files and ``--set`` overrides, and writes it back.

    base: recipe.yaml           # optional; relative to this file, or the name of a recipe or layout
    run: {dir: "${RUNS:-runs}/mine"}
    optimizer: {lr: 1e-6}

A base may have a base. A file's values win over its base's values, and overrides win over files, key by key. A list
replaces the whole list of the base.

``${VAR}`` and ``${VAR:-default}`` in a value are replaced from the environment; ``$${`` stands for a literal ``${``. An
unquoted value is read as YAML after the replacement, so ``steps: ${STEPS}`` may be a number. Relative paths (data,
model, run folder) are relative to the working directory, not to the YAML file.

Types are strict: ``"3"`` and ``true`` are not integers, ``3`` is not a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from or1_megatron.config.base import ConfigError as ConfigError
from or1_megatron.config.keys import did_you_mean, unknown_key
from or1_megatron.config.recipes import named
from or1_megatron.config.removed import drop_removed
from or1_megatron.config.schema import Config
from or1_megatron.config.yaml_reader import Origins, dump, read_file, read_value

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
"""For each error type of pydantic, what was expected, in YAML's words."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a Config from ``path`` and its bases, and apply ``overrides`` (``optimizer.lr=1e-6``, ``stages.0.steps=3``).

    Raises:
        ConfigError: a line for each wrong key or value, with file:line and the dotted key.
    """
    return load_as(Config, path, overrides)


def load_as[Schema: BaseModel](
    schema: type[Schema], path: Path | None, overrides: Sequence[str] = (), own: bool = False
) -> Schema:
    """Load a YAML file of any schema as ``load_config`` does; without a file, return the defaults with the overrides.

    ``own``: the file is a run's own config.yaml, which has every key; keys that were removed since are dropped.
    """
    data, origins = ({}, {}) if path is None else _read_with_bases(Path(path), ())
    for override in overrides:
        _override(data, origins, override)
    if own:
        drop_removed(data)
    try:
        return schema.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        faults = error.errors()
        # pydantic calls a list with wrong items too short as well; the items' own errors say it better.
        outer = {details["loc"][:n] for details in faults for n in range(1, len(details["loc"]))}
        lines = [_explain(details, origins, str(path), schema) for details in faults if details["loc"] not in outer]
        raise ConfigError("\n".join(lines)) from None


def resolved_yaml(config: Config) -> str:
    """Return the whole configuration, defaults included, as YAML that ``load_config`` reads back equal."""
    return dump(config.model_dump(mode="json"))


def to_json(config: Config) -> str:
    """Return the whole configuration as one line of JSON, which ``from_json`` reads back equal.

    The line has no ``$``: torchrun replaces ``$$`` and ``$local_rank`` in a worker's arguments.
    """
    return json.dumps(config.model_dump(mode="json")).replace("$", "\\u0024")


def from_json(text: str) -> Config:
    return Config.model_validate_json(text, strict=True)


def value_of(config: Config, key: str) -> str:
    """Return the value of one dotted key as text; the text of a section or list is YAML.

    Raises:
        ConfigError: there is no such key.
    """
    value: Any = config.model_dump(mode="json")
    parts = key.split(".")
    for depth, part in enumerate(parts):
        inside = isinstance(value, dict) and part in value
        if not inside and not (isinstance(value, list) and part.isdecimal() and int(part) < len(value)):
            raise ConfigError(f"{key}: {unknown_key(tuple(parts[: depth + 1]), Config)}")
        value = value[part] if inside else value[int(part)]
    return dump(value).rstrip() if isinstance(value, dict | list) else "" if value is None else str(value)


def _read_with_bases(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], Origins]:
    """Return (mapping of ``path`` merged over its bases, each key's origin). ``above``: the files based on ``path``."""
    if path.resolve() in above:
        chain = " -> ".join(str(file) for file in (*above, path.resolve()))
        raise ConfigError(f"{path}: 'base' leads back to itself: {chain}")
    data, origins = read_file(path)
    base = data.pop("base", None)
    if base is None:
        return data, origins
    if not isinstance(base, str):
        raise ConfigError(f"{origins[('base',)]}: base: found {_shown(base)}, expected one file name")
    below_path, recipes = path.parent / base, named("recipe") | named("layout")
    if base in recipes and not (below_path.is_file() and below_path.resolve() != path.resolve()):
        below_path = recipes[base]
    if not below_path.is_file():
        beside = [file.stem for file in below_path.parent.glob(f"*{below_path.suffix}")]
        raise ConfigError(
            f"{origins[('base',)]}: base: no such file: {below_path} (relative to {path})"
            + did_you_mean(below_path.stem, [*beside, *recipes])
        )
    below, below_origins = _read_with_bases(below_path, (*above, path.resolve()))
    _lay_over(below, data, below_origins, origins, ())
    return below, below_origins


def _lay_over(
    below: dict[str, Any], over: Mapping[str, Any], below_origins: Origins, origins: Origins, key: tuple[str, ...]
) -> None:
    """Merge ``over`` into ``below`` in place: mappings are merged key by key, other values are replaced."""
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
    """Apply one override ``a.b=value`` to ``data`` and ``origins``, in place."""
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
    """Return a validation error as ``file:line: dotted.key: found ..., expected ...``."""
    parts = tuple(str(part) for part in details["loc"])
    key = ".".join(parts)
    known_above = next((origins[parts[:n]] for n in range(len(parts), 0, -1) if parts[:n] in origins), path)
    kind = details["type"]
    if kind == "extra_forbidden":
        return f"{known_above}: {key}: {unknown_key(parts, schema)}"
    if kind == "missing":
        return f"{known_above}: {key}: missing; it has no default"
    if kind == "value_error":
        return f"{known_above}: {details['msg'].removeprefix('Value error, ')}"
    expected = _EXPECTED.get(kind) or details["msg"].removeprefix("Input should be ")
    return f"{known_above}: {key}: found {_shown(details['input'])}, expected {expected}"


def _shown(value: Any) -> str:
    """Return a value as JSON of at most 60 characters, with its type in YAML's words."""
    names = {bool: "true/false", int: "integer", float: "number", str: "string", list: "list", dict: "mapping"}
    text = json.dumps(value)
    if value is None:
        return "nothing (null)"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({names.get(type(value), type(value).__name__)})"
