"""Loads a submission inside the sandbox, and answers calls of its functions.

It reads lines from standard input: a fresh nonce, then a JSON object. The first line is the set-up {prefix, source,
starter, fork}, which is answered when the submission has been loaded. Then calls come one at a time. An answer must
repeat the nonce of its call, so text that was written before the call cannot answer it.

The submission can do anything in this process, and can also write answers itself. But it gains nothing by this,
because this process does not know the expected results.

Operations: ``call`` (function or method, with encoded arguments), and ``attribute``, ``length`` and ``items`` of an
object that a call returned and that is not data (the object stays here under a number). With ``fork`` each call runs
in a fork of the loaded submission, so that calls do not affect each other; test programs, which make objects, use no
forks. If a fork dies, the answer is {died, cpu_s}: the fork's exit status (-n for signal n) and CPU time.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from types import ModuleType

import codec  # type: ignore[import-not-found]

TYPE_CHECKING = False  # importing typing would take time
if TYPE_CHECKING:
    from typing import Any

MUTABLE = (list, dict, set, bytearray)
ANSWERED = 42  # the exit status of a fork that has answered
EXPRESSION = re.compile(r"(?:([^\W\d]\w*)\(\)\.)?([^\W\d]\w*)")


class Submission:
    def __init__(self, setup: dict[str, Any]) -> None:
        self.starter = setup["starter"]
        self.objects: list[Any] = []
        self.module = ModuleType("submission")
        sys.modules["submission"] = self.module  # dataclasses and pickle look up their module
        names = self.names = self.module.__dict__
        names.update(ListNode=codec.ListNode, TreeNode=codec.TreeNode)
        names.update(list_node=self.make_list, tree_node=self.make_tree)
        exec(compile(setup["prefix"], "prefix.py", "exec"), names)
        exec(compile(setup["source"], "submission.py", "exec"), names)

    def make_list(self, values: Any) -> Any:
        return codec.build_list(values, self.names["ListNode"])

    def make_tree(self, values: Any) -> Any:
        return codec.build_tree(values, self.names["TreeNode"])

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, dict) and "object" in encoded:
            return self.objects[encoded["object"]]
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        return codec.decode(encoded, self.names["ListNode"], self.names["TreeNode"])

    def encode(self, value: Any, keep: bool) -> Any:
        try:
            return codec.encode(value, iterators=not keep)
        except TypeError:
            if not keep:
                raise
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def find(self, expression: str) -> Any:
        """Return the function that a test names: ``f``, or ``C().f`` for C's method.

        If there is no function f, ``f`` is Solution's method; if there is no class C, ``C().f`` is the function f.
        """
        match = EXPRESSION.fullmatch(expression)
        assert match is not None
        owner, name = match.groups()
        if owner is None and name in self.names:
            return self.names[name]
        if (owner or "Solution") not in self.names and name in self.names:
            return self.names[name]
        return getattr(self.names[owner or "Solution"](), name)

    def answer(self, call: dict[str, Any], keep: bool) -> dict[str, Any]:
        operation = call["operation"]
        if operation != "call":
            owner = self.objects[call["object"]]
            if operation == "attribute":
                return {"value": self.encode(getattr(owner, call["name"]), keep)}
            return {"value": self.encode(len(owner) if operation == "length" else list(owner), keep)}
        function = self.objects[call["object"]] if "object" in call else self.find(call["name"])
        arguments = [self.decode(item) for item in call["arguments"]]
        keywords = {name: self.decode(item) for name, item in call["keywords"].items()}
        back = None if keep else self.nodes_from_annotations(function, call["name"], arguments)
        value = function(*arguments, **keywords)
        if back is not None and value is None:  # an empty structure
            value = []
        answer = {"value": self.encode(value, keep)}
        if keep:  # for tests that look at the arguments after the call
            answer["changed"] = [self.changed(item) for item in arguments]
            answer["changed_keywords"] = {name: self.changed(item) for name, item in keywords.items()}
        return answer

    def changed(self, argument: Any) -> Any:
        """Return an argument's encoded state after a call, in a list of one item; None if no call can change it."""
        if not isinstance(argument, MUTABLE) and not hasattr(argument, "val"):
            return None
        try:
            return [codec.encode(argument)]
        except TypeError:
            return None

    def nodes_from_annotations(self, function: Any, name: str, arguments: list[Any]) -> str | None:
        """Turn ``arguments`` that are annotated as nodes into nodes. Return the result's annotation if it is a node."""
        annotations = self.annotations(function)
        if not any("Node" in item for item in annotations.values()) and self.starter:
            annotations = self.starter_annotations(name) or annotations
        parameters = [item for key, item in annotations.items() if key != "return"]
        for position, annotation in enumerate(parameters[: len(arguments)]):
            for kind, make in (("ListNode", self.make_list), ("TreeNode", self.make_tree)):
                value = arguments[position]
                if kind in annotation and isinstance(value, (list, type(None))):
                    many = re.match(r".*\b(?:[Ll]ist|Sequence)\[", annotation) is not None
                    arguments[position] = [make(item) for item in value or []] if many else make(value or [])
        returned = annotations.get("return", "")
        return returned if "Node" in returned and not re.match(r"(?:typing\.)?[Ll]ist\[", returned) else None

    def annotations(self, function: Any) -> dict[str, str]:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return {}
        annotations = {name: spelled(item.annotation) for name, item in signature.parameters.items()}
        annotations["return"] = spelled(signature.return_annotation)
        return annotations

    def starter_annotations(self, name: str) -> dict[str, str]:
        import ast

        wanted = name.rpartition(".")[2]
        try:
            tree = ast.parse(self.starter.rstrip() + " ...")
        except SyntaxError:
            return {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == wanted:
                arguments = [item for item in node.args.args if item.arg != "self"]
                annotations = {item.arg: ast.unparse(item.annotation) if item.annotation else "" for item in arguments}
                annotations["return"] = ast.unparse(node.returns) if node.returns else ""
                return annotations
        return {}


def spelled(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) and "[" not in repr(annotation) else repr(annotation)


def reply(channel: int, nonce: str, answer: dict[str, Any]) -> None:
    rest = (json.dumps({**answer, "nonce": nonce}) + "\n").encode()
    while rest:
        rest = rest[os.write(channel, rest) :]


def serve(submission: Submission, lines: Any, channel: int, fork: bool, keep: bool) -> None:
    for line in lines:
        nonce, _, text = line.decode().partition(" ")
        child = os.fork() if fork else 0
        if child == 0:
            try:
                reply(channel, nonce, submission.answer(json.loads(text), keep))
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                reply(channel, nonce, {"raised": codec.complaint(error), "type": type(error).__name__})
            if fork:
                os._exit(ANSWERED)
            continue
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != ANSWERED:  # no answer will come
            reply(channel, nonce, {"died": code, "cpu_s": usage.ru_utime + usage.ru_stime})


def main() -> None:
    sys.setrecursionlimit(100_000)
    lines = os.fdopen(os.dup(0), "rb")
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the submission's own reads and prints touch neither calls nor answers
        os.dup2(null, descriptor)
    nonce, _, text = lines.readline().decode().partition(" ")
    setup = json.loads(text)
    try:
        submission = Submission(setup)
    except (Exception, SystemExit) as error:
        reply(channel, nonce, {"raised": codec.complaint(error), "type": type(error).__name__})
        return
    forks = setup["fork"] and can_fork()
    reply(channel, nonce, {"value": None, "forks": forks})
    serve(submission, lines, channel, forks, keep=not setup["fork"])


def can_fork() -> bool:
    try:
        child = os.fork()
    except OSError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


main()
