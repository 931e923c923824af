"""Reads other projects' tests of math rules, and golds of public sets, as labelled pairs. Stores no copy of them.

The tests are only read, not run. Two forms are known: pytest's ``parametrize("gold,pred,expected", [...])``, and
unittest methods that assign two texts and assert that a call with both texts is true, or is not true.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from math_pairs import Pair

from or1_verify.answer import last_box

_MAX_CHARS = 400


def suite_pairs(folder: Path) -> list[Pair]:
    """Return the pairs in all ``*test*.py`` below the folder, each once, if gold and answer are each one formula."""
    pairs = []
    for path in sorted(folder.rglob("*test*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeError):  # of another language's or version's
            continue
        for node in ast.walk(tree):
            for gold, answer, expected in _cases(node):
                contents = [_formula(text) for text in (gold, answer)]
                if None not in contents:
                    pairs.append(Pair(path.stem, (str(contents[0]),), str(contents[1]), expected))
    return list(dict.fromkeys(pairs))


def gold_pairs(file: Path) -> list[Pair]:
    """Return each gold of a JSONL file as a right answer to its own problem, and as a wrong answer to the one before.

    A gold is the row's ``final_answer`` or ``answer``, else the last box of its ``solution``. If two neighbours have
    the same text, there is no wrong answer. (Neighbours of equal value but different text still give one.)
    """
    golds = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gold = row.get("final_answer") or row.get("answer") or last_box(row["solution"])
        golds.append(str(gold[0] if isinstance(gold, list) else gold).strip().strip("$"))
    own = [Pair("own", (gold,), gold, True) for gold in golds]
    others = [Pair("other", (gold,), other, False) for gold, other in pairwise(golds)]
    return own + [pair for pair in others if pair.answer != pair.golds[0]]


def labelled_pairs(file: Path) -> list[Pair]:
    """Return the answers that a public set labels. Two sets can be read.

    HardVerify-Math (``benchmarks/HardVerify-Math.json`` of TinyV's repository) has a right and a wrong answer per row.
    GSM8K's ``example_model_solutions.jsonl`` has golds and solutions that end in ``A: 18``.
    """
    text = file.read_text(encoding="utf-8")
    rows = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    pairs = []
    for row in rows:
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        gold = gold.strip("$").strip() if gold.count("$") == 2 and gold[0] == gold[-1] == "$" else gold
        if "fn_output" in row:
            told = [(row["fn_output"], True), (row["tn_output"], False)]
        else:
            told = [(made["solution"], made["is_correct"]) for made in row.values() if isinstance(made, dict)]
        pairs += [Pair(file.stem, (gold,), answer.rpartition("A:")[2].strip(), right) for answer, right in told]
    return pairs


def _cases(node: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """Yield (gold, answer, verdict) for each case in one node of a test's syntax tree."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize" and len(node.args) > 1:
        names = ast.unparse(node.args[0]).replace("'", "").split(",")
        if [name.strip(" ()") for name in names[:2]] == ["gold", "pred"] and len(names) == 3:
            for row in getattr(node.args[1], "elts", []):
                try:
                    gold, answer, expected = ast.literal_eval(row)
                except ValueError:
                    continue
                if expected in (0, 1):
                    yield gold, answer, bool(expected)
    elif isinstance(node, ast.FunctionDef):
        texts = [
            statement.value.value
            for statement in node.body
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        ]
        said = [
            statement.value.func.attr
            for statement in node.body
            if isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and isinstance(statement.value.func, ast.Attribute)
        ]
        if (
            len(texts) == 2
            and all(isinstance(text, str) for text in texts)
            and said in (["assertTrue"], ["assertFalse"])
        ):
            yield str(texts[0]), str(texts[1]), said == ["assertTrue"]


def _formula(text: str) -> str | None:
    r"""Return the formula of a text that is only one formula, without its ``$...$`` and box; else None."""
    inner = re.fullmatch(r"\s*(?:\$\$?|\\\[|\\\()?([^$]*?)(?:\$\$?|\\\]|\\\))?\s*", text, re.DOTALL)
    if inner is None:
        return None
    content = inner[1].strip()
    boxed = re.fullmatch(r"\\boxed\{(.*)\}", content, re.DOTALL)
    if boxed:
        content = boxed[1]
    return None if "boxed" in content or not content or len(content) > _MAX_CHARS or "\n" in content else content
