"""Runs a test program inside a sandbox, against a submission in another sandbox.

The test program sees stand-ins for the submission's functions. A call of a stand-in is written to standard output. The
answer comes on standard input as plain data and is decoded into exact built-in types. So no code of the submission runs
in this process, not even an ``__eq__`` in a comparison.

Lines in: the set-up {prefix, program, stand_ins}, then answers. Lines out: {"ask": operation}, and at the end
{"passed": true}, or {"failed": words, "at": the line of the test program}.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys

import codec  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# The first two end loops: to `zip(map(f, xs), wanted)` and `all(map(f, xs))`, a StopIteration means that all was
# compared. The last two cannot be made from one text.
NEVER_PASSED_ON = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)


class Channel:
    def __init__(self) -> None:
        self.lines = os.fdopen(os.dup(0), "rb")
        self.out = os.fdopen(os.dup(1), "w")
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(null, descriptor)
        self.names: dict[str, Any] = {}
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
        if isinstance(value, Remote):
            if "object" not in value._operation:
                raise TypeError("a function of the submission cannot be an argument")
            return {"object": value._operation["object"]}
        return codec.encode(value)

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, dict) and "object" in encoded:
            return Remote(self, {"object": encoded["object"]})
        return codec.decode(encoded, self.names["ListNode"], self.names["TreeNode"])

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
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, NEVER_PASSED_ON):
                kind = RuntimeError
            raise kind(answer["raised"])
        for argument, state in zip(arguments, answer.get("changed") or [], strict=False):
            self.restore(argument, state)
        for name, state in (answer.get("changed_keywords") or {}).items():
            self.restore(keywords[name], state)
        return self.decode(answer["value"])

    def restore(self, argument: Any, state: Any) -> None:
        """Give a call's argument the state that the submission's copy has after the call, except within an assert.

        In ``assert f(x) == expected(x)``, a submission that changes x could otherwise change ``expected(x)``.
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


class Remote:
    """A stand-in for a function, class or object in the submission's process.

    The test program can call a stand-in and read its attributes and items, but cannot compare it.
    """

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask({"operation": "attribute", "object": self._object(), "name": name})

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


class Marker(ast.NodeTransformer):
    """Rewrites each assert statement, so that the channel knows when the assert is being evaluated."""

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        begin, end = (ast.parse("__channel__.in_assert = " + value).body[0] for value in ("True", "False"))
        return ast.copy_location(ast.Try(body=[begin, node], handlers=[], orelse=[], finalbody=[end]), node)


def is_same(left: Any, right: Any) -> bool:
    return bool(codec.encode(left) == codec.encode(right))


def run(setup: dict[str, Any]) -> None:
    names = CHANNEL.names
    names.update(__name__="test_program", ListNode=codec.ListNode, TreeNode=codec.TreeNode)
    names["list_node"] = lambda values: codec.build_list(values, names["ListNode"])
    names["tree_node"] = lambda values: codec.build_tree(values, names["TreeNode"])
    names["is_same_list"] = names["is_same_tree"] = is_same
    names["__channel__"] = CHANNEL
    exec(compile(Marker().visit(ast.parse(setup["prefix"])), "prefix.py", "exec"), names)
    for name, of in setup["stand_ins"].items():
        names[name] = Remote(CHANNEL, {"name": of})
    for statement in ast.parse(setup["program"]).body:
        try:
            marked = Marker().visit(statement)
            exec(compile(ast.Module([marked], []), "test_program.py", "exec"), names)
        except BaseException as error:
            CHANNEL.send({"failed": codec.complaint(error), "at": failing_line(error, setup["program"].splitlines())})
            return
    CHANNEL.send({"passed": True})


def failing_line(error: BaseException, lines: list[str]) -> str:
    """Return the text of the test program's innermost line in the traceback of ``error``; "" if there is none."""
    number, traceback = 0, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "test_program.py":
            number = traceback.tb_lineno
        traceback = traceback.tb_next
    return lines[number - 1].strip()[:200] if number else ""


CHANNEL = Channel()
sys.setrecursionlimit(100_000)
run(CHANNEL.receive())
