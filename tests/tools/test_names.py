"""House rules on names that no linter has: one class per name, docstrings whose sentences begin with a subject or a
verb, and a sentence for every file (docs/files.md)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tools.budget import tracked
from tools.files_page import PACKAGES, TOOLS_OF_TESTS, first_sentence, markdown

ROOT = Path(__file__).parents[2]
OF = re.compile(r"(?:\A|[.:]\s)\s*Of\s")


def located[Node: ast.stmt](kind: type[Node], *folders: str) -> Iterator[tuple[str, Node]]:
    """Yield each node of that kind in the folders' files, and its place."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(ROOT)
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, kind):
                    yield f"{name}:{node.lineno}", node


def test_a_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for where, node in located(ast.ClassDef, "or1_megatron", "or1_verify"):
        places[node.name].append(where)
    assert len(places) > 500  # it looked at the package
    assert {name: uses for name, uses in places.items() if len(uses) > 1} == {}


def test_no_sentence_of_a_docstring_begins_with_of() -> None:
    docstrings = {
        where: node.value.value
        for where, node in located(ast.Expr, "or1_megatron", "or1_verify", "tests", "tools", "lab")
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    assert len(docstrings) > 3000  # it looked at all folders
    assert [where for where, text in docstrings.items() if OF.search(text)] == []
    assert OF.search("It is so. Of all") and OF.search("So: Of all") and OF.search("Of all") and not OF.search("So of")


def test_every_file_has_a_sentence_and_docs_list_them() -> None:
    assert [file.name for file in tracked(PACKAGES + TOOLS_OF_TESTS) if not first_sentence(file).endswith(".")] == []
    assert (ROOT / "docs/files.md").read_text() == markdown(), "run: python -m tools.files_page > docs/files.md"
