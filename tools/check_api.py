"""Compare our calls into vLLM, Ray, Megatron-Core and Transformer Engine with their sources, without importing them.

    python -m tools.check_api [FOLDER...]

Each FOLDER holds packages, like site-packages or an unpacked wheel; the default is this Python's site-packages. A
package that is in no FOLDER is left out, with a note. The program checks imported names, arguments of calls, and
attributes: of modules, of classes, and of objects whose class follows from an annotation, a constructor or ``HINTS``.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.library_source import UNKNOWN, Class, Function, Instance, Module, Several, Sources, Thing, refusals

ROOT: Final = Path(__file__).parents[1]
OURS: Final = "or1_megatron"
LIBRARIES: Final = ("vllm", "ray", "megatron", "transformer_engine")

HINTS: Final[Mapping[tuple[str, str], str]] = {
    ("rollout.engine", "self._llm"): "vllm.entrypoints.llm.LLM",
    ("rollout.engine", "self._engine"): "vllm.v1.engine.llm_engine.LLMEngine",
    ("rollout.engine", "self._sampling_params"): "type:vllm.sampling_params.SamplingParams",
    ("rollout.engine", "iteration"): "vllm.v1.engine.EngineCoreOutputs",
    ("rollout.engine", "output"): "vllm.v1.engine.EngineCoreOutput",
    ("rollout.engine", "drafts"): "vllm.v1.metrics.stats.RequestSpecDecodeMetrics",
    ("rollout.engine", "self._engine.engine_core"): "vllm.v1.engine.core_client.InprocClient",
    ("rollout.speculation", "metadata"): "vllm.v1.spec_decode.metadata.SpecDecodeMetadata",
    ("rollout.speculation", "sampling"): "vllm.v1.sample.metadata.SamplingMetadata",
    ("rollout.speculation", "drawn"): "vllm.v1.outputs.SamplerOutput",
    ("rollout.speculation", "whole"): "vllm.v1.outputs.LogprobsTensors",
    ("rollout.worker", "self.model_runner"): "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    ("rollout.worker", "sampler"): "vllm.v1.sample.sampler.Sampler",
    ("handoff.vllm.loader_trace", "info"): "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo",
    ("handoff.vllm.direct_copy", "info"): "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo",
    ("handoff.vllm.reload", "info"): "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo",
}
"""The classes of objects that our code annotates as Any, by (our module, expression)."""

OVERRIDES: Final[Mapping[str, Sequence[str]]] = {
    "parallel.model.PolicyModel": ("forward",),
}
"""Our methods that a library calls, by our class. The library's base class must have methods of the same names."""

OPTIONS: Final[Mapping[str, str]] = {
    "rollout.engine._device_options": "vllm.engine.arg_utils.EngineArgs",
}
"""Our functions that return arguments as a dict, each with the library's record that has these arguments as fields."""

ARGUMENTS: Final[Mapping[str, str]] = {"vllm.entrypoints.llm.LLM": "vllm.engine.arg_utils.EngineArgs"}
"""Library classes whose constructor passes keywords on to a record, with the record."""

STRINGS: Final[Sequence[tuple[str, str, str]]] = (
    ("rollout.worker", "_weight_update_active", "vllm.v1.worker.gpu_worker"),
    ("rollout.worker", "rejection_sampler", "vllm.v1.worker.gpu_model_runner"),
    ("rollout.engine", "processed_logprobs", "vllm.config.model"),
    ("rollout.engine", "scheduling", "vllm.v1.engine.core"),
    ("rollout.engine_pool", "num_gpus", "ray._common.ray_option_utils"),
    ("rollout.engine_pool", "scheduling_strategy", "ray._common.ray_option_utils"),
    ("rollout.engine_pool", "runtime_env", "ray._common.ray_option_utils"),
    ("handoff.vllm.direct_copy", "UnquantizedLinearMethod", "vllm.model_executor.layers.linear"),
)
"""Names that both our source and the library's source must contain: (our module, name, library's module)."""


@dataclass
class Report:
    problems: set[str] = field(default_factory=set)
    checked: set[tuple[str, str]] = field(default_factory=set)
    """(file:line, expression) of each use of a library that the library's source has."""


class _File(ast.NodeVisitor):
    """Checks one module of ours."""

    def __init__(self, sources: Sources, module: Module, report: Report) -> None:
        self.sources, self.module, self.report = sources, module, report
        self.short = module.name.removeprefix(f"{OURS}.")
        self.hints = {text: name for (owner, text), name in HINTS.items() if owner == self.short}
        self.scopes: list[dict[str, Thing]] = [{}]
        self.classes: list[Class] = []

    # What is defined where.

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._exists(node, alias.name)
            name = alias.name if alias.asname else alias.name.split(".")[0]
            self.scopes[-1][alias.asname or name] = self.sources.find(name) or UNKNOWN

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            thing = self._exists(node, f"{node.module}.{alias.name}")
            self.scopes[-1][alias.asname or alias.name] = thing

    def _exists(self, node: ast.stmt, name: str) -> Thing:
        thing = self.sources.find(name)
        if thing is None:
            self._problem(node, f"{name} does not exist")
        elif name.split(".")[0] in LIBRARIES:
            self._found(node, name)
        return thing or UNKNOWN

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in (*node.bases, *node.decorator_list):
            self.value(each)
        cls = Class(self.module, node)
        self.scopes[-1][node.name] = cls
        self.classes.append(cls)
        for child in node.body:
            self.visit(child)
        self._check_abstract(cls)
        self.classes.pop()

    def _check_abstract(self, cls: Class) -> None:
        """Check that a class of ours has its library base's abstract methods, with the same arguments."""
        mine = {each.name: each for each in cls.node.body if isinstance(each, ast.FunctionDef)}
        for base in (each for each in self.sources.bases(cls) if isinstance(each, Class) and each != cls):
            for method in (each for each in base.node.body if isinstance(each, ast.FunctionDef)):
                if not any("abstractmethod" in ast.unparse(d) for d in method.decorator_list):
                    continue
                found = self.sources.attribute(cls, method.name)
                if not isinstance(found, Function) or found.node is method:
                    self._problem(cls.node, f"{cls.node.name} lacks {base.name}.{method.name}")
                elif method.name in mine and not found.node.args.kwarg:
                    theirs, ours = ([a.arg for a in f.args.args] for f in (method, found.node))
                    if theirs != ours[: len(theirs)]:
                        self._problem(found.node, f"{base.name}.{method.name} takes {theirs}, not {ours}")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in node.decorator_list:
            self.value(each)
        scope: dict[str, Thing] = {}
        spec = node.args
        for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
            scope[arg.arg] = self.sources.annotated(self.module, arg.annotation) if arg.annotation else UNKNOWN
        if self.classes and spec.args and spec.args[0].arg == "self":
            scope["self"] = Instance(self.classes[-1])
        for default in (*spec.defaults, *(each for each in spec.kw_defaults if each is not None)):
            self.value(default)
        self.scopes.append(scope)
        for child in node.body:
            self.visit(child)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        value = self.value(node.value) if node.value else UNKNOWN
        stated = self.sources.annotated(self.module, node.annotation)
        self._assign(node.target, value if stated == UNKNOWN else stated)  # `module: Any = megatron_module`

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._assign(node.target, _each(self.value(node.iter)))
        for child in (*node.body, *node.orelse):
            self.visit(child)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value if isinstance(value, Instance) else UNKNOWN)
        for child in node.body:
            self.visit(child)

    def _assign(self, target: ast.expr, value: Thing) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            if isinstance(owner, (Module, Class)):  # a patch of a library: it must be there to be replaced
                self._attribute(target, owner)
        else:
            for each in ast.walk(target):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    self.scopes[-1][each.id] = UNKNOWN

    def generic_visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
            else:
                self.visit(child)

    # What expressions are.

    def value(self, node: ast.expr) -> Thing:
        """Check an expression, and return the thing that it stands for."""
        thing = self._value(node)
        looked_up = bool(self.hints) and isinstance(node, (ast.Name, ast.Attribute))
        hint = self.hints.get(ast.unparse(node)) if looked_up else None
        if hint is None or hint.removeprefix("type:").split(".")[0] not in self.sources.roots:
            return thing
        named = self.sources.find(hint.removeprefix("type:"))
        if not isinstance(named, Class):
            self._problem(node, f"{hint} is no class")
            return UNKNOWN
        return named if hint.startswith("type:") else Instance(named)

    def _value(self, node: ast.expr) -> Thing:
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, self.value(node.value))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            self.value(node.slice)
            return _each(self.value(node.value))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            self.scopes.append({})
            for generator in node.generators:
                self._assign(generator.target, _each(self.value(generator.iter)))
                for condition in generator.ifs:
                    self.value(condition)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            made = [self.value(part) for part in parts][-1]
            self.scopes.pop()
            return Several(made)
        if isinstance(node, ast.Lambda):
            self.scopes.append({arg.arg: UNKNOWN for arg in node.args.args})
            self.value(node.body)
            self.scopes.pop()
            return UNKNOWN
        if isinstance(node, ast.NamedExpr):
            value = self.value(node.value)
            self._assign(node.target, value)
            return value
        parts = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return parts[0] if isinstance(node, (ast.Await, ast.Starred)) else UNKNOWN

    def _name(self, name: str) -> Thing:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return UNKNOWN

    def _attribute(self, node: ast.Attribute, owner: Thing) -> Thing:
        found = self.sources.attribute(owner, node.attr)
        if found is None and self._is_theirs(owner):
            self._problem(node, f"{_name_of(owner)} has no '{node.attr}'")
        elif found is not None and self._is_theirs(owner):
            self._found(node, ast.unparse(node))
        return found or UNKNOWN

    def _is_theirs(self, thing: Thing) -> bool:
        """Return whether a thing is a library's, or belongs to a class of ours that inherits from a library's class."""
        if isinstance(thing, (Module, Function)):
            return (thing if isinstance(thing, Module) else thing.module).name.split(".")[0] in LIBRARIES
        if isinstance(thing, (Class, Instance)):
            bases = self.sources.bases(thing.of if isinstance(thing, Instance) else thing)
            return any(isinstance(base, Class) and base.module.name.split(".")[0] in LIBRARIES for base in bases)
        return False

    def _call(self, node: ast.Call) -> Thing:
        text = ast.unparse(node.func)
        if text == "super" and self.classes:
            return self._super()
        called = self.value(node.func)
        for each in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.value(each)
        if text == "importlib.import_module" and isinstance(node.args[0], ast.Constant):
            return self._exists(node, node.args[0].value)  # type: ignore[arg-type]
        if not self._is_theirs(called):
            return self.sources.result(called)
        if isinstance(called, Function):
            self._check_call(node, called)
        elif isinstance(called, Class):
            self._check_construction(node, called)
        return self.sources.result(called)

    def _super(self) -> Thing:
        bases = [base for base in self.sources.bases(self.classes[-1]) if isinstance(base, Class)]
        return Instance(bases[1]) if len(bases) > 1 else UNKNOWN

    def _check_call(self, node: ast.Call, function: Function) -> None:
        for refusal in refusals(function, node):
            self._problem(node, f"{function.module.name}.{function.node.name} {refusal}")
        self._found(node, ast.unparse(node.func) + "(...)")

    def _check_construction(self, node: ast.Call, cls: Class) -> None:
        maker, fields = self.sources.constructor(cls), self.sources.fields(cls)
        record = ARGUMENTS.get(cls.name)
        if maker is not None:
            self._check_call(node, maker)
        if maker is not None and record is None:
            return
        if record is not None:
            passed_on = self.sources.find(record)
            assert maker is not None and isinstance(passed_on, Class), f"{record} is not there"
            spec = maker.node.args
            fields = {*(self.sources.fields(passed_on) or ()), *(arg.arg for arg in (*spec.args, *spec.kwonlyargs))}
        for keyword in node.keywords if fields is not None else ():
            if keyword.arg is not None and keyword.arg not in fields:
                self._problem(node, f"{record or cls.name} has no field '{keyword.arg}'")
        self._found(node, ast.unparse(node.func) + "(...)")

    def _found(self, node: ast.stmt | ast.expr, what: str) -> None:
        self.report.checked.add((self._place(node), what))

    def _problem(self, node: ast.stmt | ast.expr, what: str) -> None:
        self.report.problems.add(f"{self._place(node)}: {what}")

    def _place(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.module.path.relative_to(self.sources.roots[OURS])}:{node.lineno}"


def check(folders: Sequence[Path], ours: Path = ROOT) -> Report:
    """Check all of our code against the packages that the folders hold. ``ours`` holds the folder or1_megatron."""
    roots = {name: folder for name in LIBRARIES for folder in reversed(folders) if (folder / name).is_dir()}
    sources, report = Sources({**roots, OURS: ours}), Report()
    for path in sorted((ours / OURS).rglob("*.py")):
        parts = path.relative_to(ours).with_suffix("").parts
        module = sources.module(".".join(part for part in parts if part != "__init__"))
        assert module is not None
        if any(library in path.read_text() for library in LIBRARIES):
            _File(sources, module, report).visit(module.tree)
    report.problems |= set(_tables(sources))
    return report


def _tables(sources: Sources) -> Iterator[str]:
    """Yield a sentence for each name in the tables above that does not exist."""
    for name, methods in OVERRIDES.items():
        cls = sources.find(f"{OURS}.{name}")
        assert isinstance(cls, Class), name
        above = [base for base in sources.bases(cls) if isinstance(base, Class) and base != cls]
        for method in methods:
            if above and not any(sources.attribute(base, method) is not None for base in above[:1]):
                yield f"{OURS}.{name}: {above[0].name} has no '{method}' to override"
    for function, record in OPTIONS.items():
        made, of = sources.find(f"{OURS}.{function}"), sources.find(record)
        if of == UNKNOWN:
            continue
        assert isinstance(made, Function), function
        fields = sources.fields(of) or set() if isinstance(of, Class) else set()
        for key in _dict_keys(made.node):
            if key.value not in fields:
                place = made.module.path.relative_to(sources.roots[OURS])
                yield f"{place}:{key.lineno}: {record} has no field '{key.value}'"
    for module, text, library in STRINGS:
        theirs, mine = sources.module(library), sources.module(f"{OURS}.{module}")
        assert mine is not None and text in mine.path.read_text(), f"{module} no longer says {text}"
        if library.split(".")[0] in sources.roots and (theirs is None or text not in theirs.path.read_text()):
            yield f"{OURS}.{module}: {library} does not know '{text}'"


def _dict_keys(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the constant keys of the dicts in ``node`` and of assignments to ``dict[key]``; leave out nested dicts."""
    dicts = [each for each in ast.walk(node) if isinstance(each, ast.Dict)]
    nested = {id(inner) for each in dicts for value in each.values for inner in ast.walk(value)}
    for each in (each for each in ast.walk(node) if id(each) not in nested):
        keys = each.keys if isinstance(each, ast.Dict) else []
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
            keys = [each.slice]
        yield from (key for key in keys if isinstance(key, ast.Constant))


def _each(thing: Thing) -> Thing:
    return thing.of if isinstance(thing, Several) else UNKNOWN


def _name_of(thing: Thing) -> str:
    if isinstance(thing, Instance):
        return thing.of.name
    return thing.name if isinstance(thing, (Module, Class)) else str(thing)


def main() -> int:
    folders = [Path(each) for each in sys.argv[1:]] or [Path(sysconfig.get_path("purelib"))]
    report = check(folders)
    for library in LIBRARIES:
        if not any((folder / library).is_dir() for folder in folders):
            print(f"{library}: not in {', '.join(map(str, folders))}")
    print(*sorted(report.problems), f"{len(report.checked)} uses found, {len(report.problems)} problems", sep="\n")
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
