"""Reads and writes YAML with stricter rules: refuses double keys, fills in environment variables, keeps line numbers.

PyYAML's YAML 1.1 takes the last of two equal keys and reads ``1e-6`` as a string, ``on`` as true and ``2024-01-01`` as
a date. Here a double key is refused, ``1e-6`` is a number, and ``on`` and ``2024-01-01`` are strings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from or1_megatron.config.base import ConfigError

Origins = dict[tuple[str, ...], str]
"""``file:line`` of each key. A key is a tuple of its parts, list indices included."""

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}|\$\{")
_RESOLVERS: Final = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", "-+.0123456789"),
)
"""(Type, pattern, first characters) of unquoted words that are no strings: YAML 1.2's core rules without inf, nan."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML's own attribute: none of its rules


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012  # the same, or what is dumped would read back otherwise


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def read_file(path: Path) -> tuple[dict[str, Any], Origins]:
    """Return (the mapping in the YAML file ``path`` with environment variables filled in, each key's ``file:line``).

    Raises:
        ConfigError: the file is missing, or is not UTF-8, YAML or a mapping; a key is given twice; a variable is unset.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected a YAML configuration")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    node = _compose(text, str(path))
    if node is None:
        return {}, {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{_line(node)}: found {_kind(node)}, expected a mapping of sections")
    origins: Origins = {}
    value: dict[str, Any] = _Reader(str(path), origins).value(node, ())
    return value, origins


def read_value(text: str, where: str) -> Any:
    """Return the value of YAML text with environment variables filled in. A ConfigError's text names ``where``."""
    node = _compose(text, where)
    return None if node is None else _Reader(where, {}).value(node, ())


def dump(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return YAML that ``read_file`` reads back equal, in the order of ``data``; ``${`` in strings is escaped."""
    return yaml.dump(_escaped(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: _escaped(child) for key, child in value.items()}
    return [_escaped(child) for child in value] if isinstance(value, list) else value


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: yaml.Node) -> str:
    return {"ScalarNode": "a single value", "SequenceNode": "a list", "MappingNode": "a mapping"}[type(node).__name__]


class _Reader:
    """Builds the Python values of one YAML document, and records each key's ``file:line`` in ``origins``."""

    def __init__(self, where: str, origins: Origins) -> None:
        self._where, self._origins = where, origins

    def value(self, node: yaml.Node, key: tuple[str, ...]) -> Any:
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, key))
        if isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                self._origins[(*key, str(index))] = f"{self._where}:{_line(child)}"
            return [self.value(child, (*key, str(index))) for index, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, key)

    def _items(self, node: yaml.MappingNode, key: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for name_node, child in node.value:
            name, line = str(name_node.value), _line(name_node)
            dotted = ".".join((*key, name))
            if not isinstance(name_node, yaml.ScalarNode) or name == "<<":
                raise ConfigError(f"{self._where}:{line}: {dotted}: expected a plain key (to merge files, write base:)")
            if name in seen:
                raise ConfigError(f"{self._where}:{line}: {dotted}: given twice; first in line {seen[name]}")
            seen[name] = line
            self._origins[(*key, name)] = f"{self._where}:{line}"
            yield name, self.value(child, (*key, name))

    def _scalar(self, node: yaml.ScalarNode, key: tuple[str, ...]) -> Any:
        if "$" in node.value:
            expanded = self._expand(node, key)
            if node.style is None and expanded != node.value and "\n" not in expanded:
                tag = _Loader("").resolve(yaml.ScalarNode, expanded, (True, False))
                node = yaml.ScalarNode(tag, expanded, node.start_mark, node.end_mark)
            else:
                return expanded
        try:
            return _Loader("").construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            reason = getattr(error, "problem", None) or error
            raise ConfigError(f"{self._where}:{_line(node)}: {'.'.join(key)}: {reason}") from None

    def _expand(self, node: yaml.Node, key: tuple[str, ...]) -> str:
        def replacement(match: re.Match[str]) -> str:
            name, default = match[1], match[3]
            if match[0] == "$${":
                return "${"
            at = f"{self._where}:{_line(node)}: {'.'.join(key)}"
            if name is None:
                raise ConfigError(f"{at}: '${{' without a name and '}}'; expected ${{NAME}} or ${{NAME:-default}}")
            if value := os.environ.get(name):
                return value
            if match[2] is None:
                state = "empty" if name in os.environ else "not set"
                raise ConfigError(f"{at}: environment variable {name} is {state}; set it, or give ${{{name}:-default}}")
            return default

        return _REFERENCE.sub(replacement, node.value)
