"""Reads the source of Python packages without importing them: the names they define, the arguments functions take."""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_IMPORTED_TO_LOOK_AT = frozenset({"torch", "abc", "enum", "typing", "collections", "types", "pickle", "builtins"})
"""Packages whose classes are imported to look at them, because library classes inherit attributes from them."""


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module


@dataclass(frozen=True)
class Function:
    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    bound: bool = False
    """Whether the first argument (self or cls) is already given."""


@dataclass(frozen=True)
class Class:
    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"


@dataclass(frozen=True)
class Instance:
    of: Class


@dataclass(frozen=True)
class Several:
    """A list, tuple or other iterable, whose elements are ``of``."""

    of: Thing


@dataclass(frozen=True)
class Unknown:
    """Something that exists, but the source does not tell what it is."""


Thing = Module | Function | Class | Instance | Several | Unknown
UNKNOWN = Unknown()


class Sources:
    """The sources of packages. ``roots``: by a package's name, the folder in which the package's folder is."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self.roots = roots
        self._modules: dict[str, Module | None] = {}
        self._names: dict[str, dict[str, list[ast.AST]]] = {}

    def module(self, name: str) -> Module | None:
        """Return a module; None where there is none."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        root = self.roots.get(name.split(".")[0])
        if root is None:
            return None
        stem = root.joinpath(*name.split("."))
        for path in (stem / "__init__.py", stem.with_suffix(".py")):
            if path.is_file():
                return Module(name, path, _parse(path))
        return None

    def find(self, name: str) -> Thing | None:
        """Return what a dotted name stands for; UNKNOWN for a name in other packages, None for a missing name."""
        head, _, last = name.rpartition(".")
        if name.split(".")[0] not in self.roots:
            return UNKNOWN
        if (module := self.module(name)) is not None:
            return module
        base = self.find(head) if head else None
        return None if base is None else self.attribute(base, last)

    def attribute(self, of: Thing, name: str) -> Thing | None:
        """Return ``of.name``; None if it is missing."""
        if isinstance(of, Module):
            return self._in_module(of, name)
        if isinstance(of, (Class, Instance)):
            return self._in_class(of, name)
        return UNKNOWN

    def _in_module(self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Thing | None:
        if (module.name, name) in seen:
            return UNKNOWN
        seen |= {(module.name, name)}
        names = self.names(module)
        found = [self._defined(module, node, name, seen) for node in names.get(name, ())]
        # Among several definitions (with and without an optional package), take one that can be looked into.
        best = next((thing for thing in found if thing is not None and thing != UNKNOWN), None)
        if best is not None or UNKNOWN in found:
            return best or UNKNOWN
        if (inner := self.module(f"{module.name}.{name}")) is not None:
            return inner
        for star in names.get("*", ()):
            source = self.module(self._source_of(module, star)) if isinstance(star, ast.ImportFrom) else None
            if source is None or (thing := self._in_module(source, name, seen)) is not None:
                return UNKNOWN if source is None else thing
        return None

    def _defined(self, module: Module, node: ast.AST, name: str, seen: frozenset[tuple[str, str]]) -> Thing | None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Function(module, node)
        if isinstance(node, ast.ClassDef):
            return Class(module, node)
        if isinstance(node, ast.Import):
            alias = next(alias for alias in node.names if name in (alias.asname, alias.name.split(".")[0]))
            return self.find(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom):
            alias = next(alias for alias in node.names if name in (alias.asname, alias.name))
            source = self._source_of(module, node)
            if source.split(".")[0] not in self.roots:
                return UNKNOWN
            base = self.module(source)
            return None if base is None else self._in_module(base, alias.name, seen)
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
            return self.expression(module, node.value) or UNKNOWN
        if isinstance(node, ast.AnnAssign):
            return self.annotated(module, node.annotation)
        return UNKNOWN

    def _source_of(self, module: Module, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.name.split(".")
        package = parts if module.path.name == "__init__.py" else parts[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *(node.module or "").split(".")]).rstrip(".")

    def names(self, module: Module) -> dict[str, list[ast.AST]]:
        """Return the statements of a module that define names, in all branches of the code, by name."""
        if module.name not in self._names:
            found: dict[str, list[ast.AST]] = {}
            for node, name in _definitions(module.tree.body):
                found.setdefault(name, []).append(node)
            self._names[module.name] = {name: sorted(nodes, key=_is_overload) for name, nodes in found.items()}
        return self._names[module.name]

    def expression(self, module: Module, node: ast.expr) -> Thing | None:
        """Return what a dotted expression stands for at the top level of a module."""
        if isinstance(node, ast.Name):
            return self._in_module(module, node.id) or (UNKNOWN if hasattr(builtins, node.id) else None)
        if isinstance(node, ast.Attribute):
            base = self.expression(module, node.value)
            return None if base is None else self.attribute(base, node.attr)
        return UNKNOWN

    def annotated(self, module: Module, node: ast.expr | None) -> Thing:
        """Return what a value with this annotation is."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):  # X | None
            sides = [self.annotated(module, side) for side in (node.left, node.right) if not _is_none(side)]
            return sides[0] if len(sides) == 1 else UNKNOWN
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value).split(".")[-1]
            inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            if outer in ("Optional", "Final", "Annotated", "ClassVar"):
                return self.annotated(module, inner)
            if outer in ("list", "List", "Sequence", "Iterable", "Iterator", "Collection", "set", "frozenset"):
                return Several(self.annotated(module, inner))
            return self.annotated(module, node.value)
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(
            thing := self.expression(module, node) or UNKNOWN, Class
        ):
            return Instance(thing)
        return UNKNOWN

    def bases(self, of: Class) -> Iterator[Class | str]:
        """Yield a class and all classes that it inherits from; classes of other packages as dotted names."""
        yield of
        for node in of.node.bases:
            base = node.value if isinstance(node, ast.Subscript) else node
            thing = self.expression(of.module, base)
            if isinstance(thing, Class):
                yield from self.bases(thing)
            else:
                yield self._full_name(of.module, base)

    def _full_name(self, module: Module, node: ast.expr) -> str:
        head, _, rest = ast.unparse(node).partition(".")
        for defined in self.names(module).get(head, ()):
            if isinstance(defined, ast.ImportFrom) and not defined.level:
                alias = next(alias for alias in defined.names if head in (alias.asname, alias.name))
                return ".".join(filter(None, (defined.module, alias.name, rest)))
            if isinstance(defined, ast.Import):
                alias = next(alias for alias in defined.names if head in (alias.asname, alias.name.split(".")[0]))
                return ".".join(filter(None, (alias.name if alias.asname else head, rest)))
        return ".".join(filter(None, ("builtins" if hasattr(builtins, head) else "", head, rest)))

    def _in_class(self, of: Class | Instance, name: str) -> Thing | None:
        cls, opaque = (of.of if isinstance(of, Instance) else of), False
        for base in self.bases(cls):
            if isinstance(base, str):
                inherited = _names_of(base)
                if inherited is None or name in inherited:
                    opaque = True
                continue
            for node, defined in _members(base.node):
                if defined == name:
                    return self._member(base, node, isinstance(of, Instance))
            if any(defined == "__getattr__" for _, defined in _members(base.node)):
                opaque = True
        return UNKNOWN if opaque or self._in_subclasses(cls, name) else None

    def _in_subclasses(self, of: Class, name: str) -> bool:
        """Return whether a subclass in the same folder has ``name``. (Our code may have checked the subclass with
        isinstance.)"""
        for path in sorted(of.module.path.parent.glob("*.py")):
            if name not in path.read_text(encoding="utf-8"):
                continue
            head = of.module.name if of.module.path.name == "__init__.py" else of.module.name.rpartition(".")[0]
            module = self.module(f"{head}.{path.stem}" if path.stem != "__init__" else head)
            for node in (each for each in (module.tree.body if module else ()) if isinstance(each, ast.ClassDef)):
                inherits = module is not None and of in self.bases(Class(module, node))
                if inherits and any(defined == name for _, defined in _members(node)):
                    return True
        return False

    def _member(self, owner: Class, node: ast.AST, of_instance: bool) -> Thing:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kinds = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
            if kinds & {"property", "cached_property"}:
                return self.annotated(owner.module, node.returns)
            return Function(owner.module, node, "classmethod" in kinds or (of_instance and "staticmethod" not in kinds))
        if isinstance(node, ast.AnnAssign):
            return self.annotated(owner.module, node.annotation)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = self.expression(owner.module, node.value.func)
            return self.result(made) if made is not None else UNKNOWN
        return UNKNOWN

    def result(self, called: Thing) -> Thing:
        """Return what a call of ``called`` returns."""
        if isinstance(called, Class):
            return Instance(called)
        return self.annotated(called.module, called.node.returns) if isinstance(called, Function) else UNKNOWN

    def fields(self, of: Class) -> set[str] | None:
        """Return what the constructor of a record (dataclass, Struct, BaseModel) takes; None for another class."""
        classes = list(self.bases(of))
        marks = [ast.unparse(d) for c in classes if isinstance(c, Class) for d in c.node.decorator_list]
        marks += [c for c in classes if isinstance(c, str)]
        kinds = ("dataclass", "Struct", "BaseModel", "NamedTuple", "config")
        if not any(kind in mark for mark in marks for kind in kinds):
            return None
        return {
            name
            for c in classes
            if isinstance(c, Class)
            for node, name in _definitions(c.node.body)
            if isinstance(node, ast.AnnAssign)
        }

    def constructor(self, of: Class) -> Function | None:
        """Return a class's ``__init__``; None if it has none, or inherits it from a package outside of ``roots``."""
        for base in self.bases(of):
            if isinstance(base, str):
                continue
            for node, name in _members(base.node):
                if name == "__init__" and isinstance(node, ast.FunctionDef):
                    return Function(base.module, node, bound=True)
        return None


def refusals(function: Function, call: ast.Call) -> Iterator[str]:
    """Yield a phrase for each argument of a call that a function does not take, or that it needs and does not get."""
    spec = function.node.args
    positional = [arg.arg for arg in (*spec.posonlyargs, *spec.args)][1 if function.bound else 0 :]
    spread = any(isinstance(arg, ast.Starred) for arg in call.args)
    if len(call.args) > len(positional) and not spec.vararg and not spread:
        yield f"takes {len(positional)} positional arguments, given {len(call.args)}"
    known = {*positional, *(arg.arg for arg in spec.kwonlyargs)} - {arg.arg for arg in spec.posonlyargs}
    given = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    if not spec.kwarg:
        yield from (f"takes no argument '{name}'" for name in given if name not in known)
    if spread or len(given) < len(call.keywords):
        return
    wanted = positional[: len(positional) - len(spec.defaults)] if spec.defaults else positional
    only = [arg.arg for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None]
    for name in [*wanted[len(call.args) :], *only]:
        if name not in given:
            yield f"needs the argument '{name}'"


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, str]]:
    """Yield (statement, name) for each name that statements define, but not inside of functions and classes."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node, node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield node, alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((node, name.id) for name in ast.walk(target) if isinstance(name, ast.Name))
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _definitions(getattr(node, inner, []))
        for handler in getattr(node, "handlers", ()):
            yield from _definitions(handler.body)


@cache
def _members(node: ast.ClassDef) -> list[tuple[ast.AST, str]]:
    """Return (statement, name) for each member of a class, including attributes that its methods set on ``self``."""
    own = list(_definitions(node.body))
    own.sort(key=lambda each: _is_overload(each[0]))
    for method in (each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for statement in ast.walk(method):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                own += [(statement, n.attr) for t in targets for n in ast.walk(t) if _of_self(n)]  # type: ignore[attr-defined]
    return own


def _is_overload(node: ast.AST) -> bool:
    return any(ast.unparse(each).endswith("overload") for each in getattr(node, "decorator_list", ()))


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


@cache
def _names_of(dotted: str) -> frozenset[str] | None:
    """Return the names of all attributes of another package's class; None if they cannot be found."""
    module, _, name = dotted.rpartition(".")
    if dotted.split(".")[0] not in _IMPORTED_TO_LOOK_AT:
        return None
    try:
        return frozenset(dir(getattr(importlib.import_module(module), name)))
    except (ImportError, AttributeError):
        return None
