"""The program inside the sandbox that runs a test program against a submission which is in another sandbox.

Its text is what the sandbox runs; we never import it. Standard library only. The test program sees stand-ins for what
it tests; using one asks over the channel (standard output) and waits for the answer (standard input), which is plain
data, decoded here into exact built-in types: nothing of the submission's ever runs in this process, so neither its
``__eq__`` nor anything else of it takes part in a comparison.

Lines in: the set-up {codec, prefix, program, entry_point}, then answers. Lines out: {"ask": operation} and at the end
{"passed": statements} or {"failed": words, "at": what was being run}.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


class Channel:
    def __init__(self) -> None:
        self.lines = os.fdopen(os.dup(0), "rb")
        self.out = os.fdopen(os.dup(1), "w")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(null, descriptor)
        self.codec = ModuleType("codec")
        self.names: dict[str, Any] = {}
        self.in_assert = False

    def assert_begins(self) -> None:
        self.in_assert = True

    def assert_ends(self) -> None:
        self.in_assert = False

    def receive(self) -> Any:
        line = self.lines.readline()
        if not line:
            sys.exit(1)
        return json.loads(line)

    def send(self, message: Any) -> None:
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()

    def encode(self, value: Any) -> Any:
        if isinstance(value, Member):
            value = value._value()
        if isinstance(value, Remote):
            if "object" not in value._operation:
                raise TypeError("a function of the submission cannot be an argument")
            return {"object": value._operation["object"]}
        return self.codec.encode(value)

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, dict) and "object" in encoded:
            return Remote(self, {"object": encoded["object"], "name": ""})
        return self.codec.decode(encoded, self.names["ListNode"], self.names["TreeNode"])

    def ask(self, operation: dict[str, Any], arguments: tuple[Any, ...] = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        operation = {
            **operation,
            "arguments": [self.encode(item) for item in arguments],
            "keywords": {name: self.encode(item) for name, item in keywords.items()},
        }
        self.send({"ask": operation})
        answer = self.receive()
        if "raised" in answer:
            kind = getattr(builtins, answer["type"], RuntimeError)
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, UnicodeError):
                kind = RuntimeError
            raise kind(answer["raised"])
        for argument, state in zip(arguments, answer.get("changed") or [], strict=False):
            self.restore(argument, state)
        for name, state in (answer.get("changed_keywords") or {}).items():
            self.restore(keywords[name], state)
        return self.decode(answer["value"])

    def restore(self, argument: Any, state: Any) -> None:
        """Do to the caller's argument what the call did to its copy.

        Not within an assert: in ``assert f(x) == expected(x)`` a submission would change what it is compared with.
        """
        if state is None or self.in_assert:
            return
        new = self.decode(state[0])
        if isinstance(argument, (list, bytearray)) and isinstance(new, (list, bytes)):
            argument[:] = new
        elif isinstance(argument, (dict, set)) and type(new) is type(argument):
            argument.clear()
            argument.update(new)
        elif hasattr(argument, "val") and type(new) is type(argument):
            argument.__dict__.update(new.__dict__)


class Asked:
    """Something of the submission's, which is in another process."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, channel: Channel, operation: dict[str, Any]) -> None:
        self._channel = channel
        self._operation = operation

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise TypeError("an attribute of the submission's object cannot be set from outside")
        object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._channel.ask({"operation": "call", **self._operation}, arguments, keywords)


class Remote(Asked):
    """A function, class or object of the submission. It can be called and looked into, never compared."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Member(self._channel, {"object": self._object(), "name": name})

    def __len__(self) -> int:
        length = self._channel.ask({"operation": "length", "object": self._object()})
        if not isinstance(length, int):
            raise TypeError("a length that is no integer")
        return length

    def __iter__(self) -> Any:
        return iter(self._channel.ask({"operation": "items", "object": self._object()}))

    def _object(self) -> int:
        if "object" not in self._operation:
            raise TypeError("expected a call of the submission's function " + self._operation["name"])
        return self._operation["object"]

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("an object of the submission's own class cannot be compared: it would judge itself")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse


class Member(Asked):
    """``object.name``: a method when called, else data that is fetched when it is compared or used."""

    def _value(self) -> Any:
        return self._channel.ask({"operation": "attribute", **self._operation})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._value(), name)

    def __eq__(self, other: object) -> bool:
        return bool(self._value() == other)

    def __ne__(self, other: object) -> bool:
        return bool(self._value() != other)

    def __bool__(self) -> bool:
        return bool(self._value())

    def __len__(self) -> int:
        return len(self._value())

    def __iter__(self) -> Any:
        return iter(self._value())

    def __getitem__(self, key: Any) -> Any:
        return self._value()[key]


class AssertMarker(ast.NodeTransformer):
    """Tells the channel when an assert is being evaluated."""

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        begin, end = (ast.parse(name + "()").body[0] for name in ("__assert_begins__", "__assert_ends__"))
        marked = ast.Try(body=[begin, node], handlers=[], orelse=[], finalbody=[end])
        for part in (begin, end, marked):
            for child in ast.walk(part):
                if child is not node and not hasattr(child, "lineno"):
                    ast.copy_location(child, node)
        return ast.fix_missing_locations(marked)


def unbound(tree: ast.Module, names: dict[str, Any]) -> list[str]:
    """Names that the test program uses and nobody gives it: the submission's."""
    bound, used = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used.append(node.id)
            else:
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return [name for name in dict.fromkeys(used) if not (name in bound or name in names or hasattr(builtins, name))]


def is_same_list(left: Any, right: Any) -> bool:
    return CHANNEL.codec.encode(left) == CHANNEL.codec.encode(right)


def run(setup: dict[str, Any]) -> None:
    names = CHANNEL.names
    exec(setup["codec"], CHANNEL.codec.__dict__)
    names["__name__"] = "test_program"
    for name in ("ListNode", "TreeNode"):
        names[name] = getattr(CHANNEL.codec, name)
    names["list_node"] = lambda values: CHANNEL.codec.build_list(values, names["ListNode"])
    names["tree_node"] = lambda values: CHANNEL.codec.build_tree(values, names["TreeNode"])
    names["is_same_list"] = names["is_same_tree"] = is_same_list
    exec(compile(setup["prefix"], "prefix.py", "exec"), names)
    tree = ast.parse(setup["program"])
    if setup["entry_point"] is None:
        for name in unbound(tree, names):
            names[name] = Remote(CHANNEL, {"name": name})
    names["__assert_begins__"], names["__assert_ends__"] = CHANNEL.assert_begins, CHANNEL.assert_ends
    statements = list(tree.body)
    if setup["entry_point"] is not None:
        names["candidate"] = Remote(CHANNEL, {"name": setup["entry_point"]})
        statements += ast.parse("check(candidate)").body
    for statement in statements:
        at = ast.unparse(statement)[:200] if setup["entry_point"] is None else ""
        try:
            marked = AssertMarker().visit(statement)
            exec(compile(ast.Module([marked], []), "test_program.py", "exec"), names)
        except BaseException as error:
            words = (type(error).__name__ + ": " + str(error))[:300]
            line = failing_line(error)
            CHANNEL.send({"failed": words, "at": at or source_line(setup["program"], line), "line": line})
            return
    CHANNEL.send({"passed": len(statements)})


def failing_line(error: BaseException) -> int:
    """The last line of the test program's own that the exception passed through."""
    line, traceback = 0, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "test_program.py":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def source_line(program: str, line: int) -> str:
    lines = program.splitlines()
    return lines[line - 1].strip()[:200] if 0 < line <= len(lines) else ""


CHANNEL = Channel()
sys.setrecursionlimit(100_000)
sys.set_int_max_str_digits(0)
run(CHANNEL.receive())
