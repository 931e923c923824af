"""The import rules, as a contract for import-linter: a module imports only what the entry of its folder lists.

An entry is one line of ``allowed`` in pyproject.toml: ``folder: ours | libraries``, with names separated by commas.
Names in the first root package (or1_megatron) omit the package's name. A module follows the entry with the longest
matching name; a module without an entry breaks the contract. Every module may import the standard library and ``free``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import grimp
from importlinter import Contract, ContractCheck, fields, output


@dataclass(frozen=True)
class Entry:
    """What the modules under ``name`` may import in addition to each other."""

    name: str
    allowed: frozenset[str]

    @classmethod
    def parse(cls, line: str) -> Entry:
        name, _, rest = line.partition(":")
        return cls(name.strip(), frozenset(part.strip() for part in rest.replace("|", ",").split(",") if part.strip()))

    def allows(self, imported: str) -> bool:
        return any(_within(imported, name) for name in (self.name, *self.allowed))


class AllowedImports(Contract):
    """Fails for each import that no entry allows, and for each module that no entry covers."""

    type_name = "allowed"

    allowed = fields.ListField(subfield=fields.StringField())
    free = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        packages = self.session_options["root_packages"]
        first = f"{packages[0]}."
        free = frozenset({*packages, *sys.stdlib_module_names, *(self.free or ())})  # type: ignore[call-overload]
        entries = sorted(map(Entry.parse, self.allowed), key=lambda entry: -len(entry.name))  # type: ignore[call-overload]
        problems = []
        for module in sorted(
            m for m in graph.modules if any(_within(m, package) and m != package for package in packages)
        ):
            name = module.removeprefix(first)
            entry = next((candidate for candidate in entries if _within(name, candidate.name)), None)
            if entry is None:
                problems.append(f"{name} has no entry")
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                if imported in free or imported.split(".")[0] in sys.stdlib_module_names:
                    continue
                if not entry.allows(imported.removeprefix(first)):
                    problems.append(f"{name} imports {imported}, which the entry '{entry.name}' does not list")
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for problem in check.metadata["problems"]:
            output.print_error(f"- {problem}", bold=False)


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
