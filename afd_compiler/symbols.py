"""What a name in an upstream module means: looked up in the source tree, never by importing it."""

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from afd_compiler.source import SourceTree

MODULE_FACTORIES = ("FusedMoEFactory",)
"""vLLM's functions that build a module, as a class does."""


class SymbolKind(Enum):
    CLASS = "class"
    FUNCTION = "function"
    VALUE = "value"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Symbol:
    """The definition that a name leads to through imports: its module, its own name and its kind."""

    module: str
    name: str
    kind: SymbolKind

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


PLATFORM_QUESTIONS = {
    "is_cuda": ("cuda",),
    "is_rocm": ("rocm",),
    "is_cuda_alike": ("cuda", "rocm"),
    "is_cpu": ("cpu",),
    "is_out_of_tree": ("npu",),
    "is_xpu": ("xpu",),
}
"""Methods of vLLM's `current_platform`, and the platforms on which they answer yes."""


def platform_answer(question: str, platform: str) -> bool:
    """What `current_platform.<question>()` says on a platform; a platform not compiled for is never the one."""
    return platform in PLATFORM_QUESTIONS.get(question, ())


class ModuleIndex:
    """Top-level definitions and imports of one upstream module, as one platform sees them."""

    def __init__(self, module: str, text: str, *, package: bool, platform: str) -> None:
        self.module, self.platform = module, platform
        self.package = module if package else module.rpartition(".")[0]
        self.text = text
        self.tree = ast.parse(text)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self._statements if isinstance(node, ast.ClassDef)}

    @cached_property
    def functions(self) -> frozenset[str]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return frozenset(node.name for node in self._statements if isinstance(node, kinds))

    @cached_property
    def values(self) -> frozenset[str]:
        assigned = (node for node in self._statements if isinstance(node, ast.Assign | ast.AnnAssign))
        targets = (node.targets if isinstance(node, ast.Assign) else [node.target] for node in assigned)
        return frozenset(target.id for group in targets for target in group if isinstance(target, ast.Name))

    @cached_property
    def names(self) -> frozenset[str]:
        """All global names."""
        return frozenset({*self.classes, *self.functions, *self.values, *self.imports})

    def method(self, class_name: str, name: str) -> ast.FunctionDef | None:
        """A method that a class defines itself."""
        body = self.classes[class_name].body if class_name in self.classes else []
        return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)

    def class_attribute(self, class_name: str, attribute: str) -> str | None:
        """The global name that a class attribute is set to."""
        for node in self.classes[class_name].body:
            match node:
                case ast.Assign(value=ast.Name(id=held)) | ast.AnnAssign(value=ast.Name(id=held)):
                    if names_defined(node) == [attribute]:
                        return held
        return None

    @cached_property
    def tables(self) -> dict[str, dict[str, str]]:
        """Global dictionaries of names: `{"key": Name, …}`."""
        found: dict[str, dict[str, str]] = {}
        for node in self._statements:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=table)], value=ast.Dict() as value)
                    | ast.AnnAssign(target=ast.Name(id=table), value=ast.Dict() as value)
                ):
                    pairs = zip(value.keys, value.values, strict=True)
                    found[table] = {
                        str(key.value): held.id
                        for key, held in pairs
                        if isinstance(key, ast.Constant) and isinstance(held, ast.Name)
                    }
        return {table: entries for table, entries in found.items() if entries}

    def names_returned(self, function: str) -> list[str]:
        """Global names that a function can return, alone or first in a tuple."""
        body = next(node for node in self._statements if isinstance(node, ast.FunctionDef) and node.name == function)
        values = [node.value for node in ast.walk(body) if isinstance(node, ast.Return)]
        firsts = [value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value for value in values]
        names = [part.id for value in firsts if value for part in ast.walk(value) if isinstance(part, ast.Name)]
        return [name for name in dict.fromkeys(names) if name in self.names]

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, name in it); the name is "" where the module itself was imported."""
        found: dict[str, tuple[str, str]] = {}
        for node in self._statements:
            if isinstance(node, ast.ImportFrom):
                origin = self.absolute(node.module or "", node.level)
                found |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names if alias.name != "*"}
            elif isinstance(node, ast.Import):
                found |= {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
                found |= {(top := alias.name.partition(".")[0]): (top, "") for alias in node.names if not alias.asname}
        return found

    @cached_property
    def star_imports(self) -> tuple[str, ...]:
        """Modules of which this one re-exports everything."""
        stars = (node for node in self._statements if isinstance(node, ast.ImportFrom) and node.names[0].name == "*")
        return tuple(self.absolute(node.module or "", node.level) for node in stars)

    def absolute(self, module: str, level: int) -> str:
        """Absolute name of a module that an import statement of this file names at a relative level."""
        if level == 0:
            return module
        base = self.package.split(".")
        return ".".join([*base[: len(base) - level + 1], *([module] if module else [])])

    @cached_property
    def _statements(self) -> list[ast.stmt]:
        """Statements that run at import time, those under `if` and `try` included."""
        found: list[ast.stmt] = []
        pending = list(reversed(self.tree.body))
        while pending:
            node = pending.pop()
            found.append(node)
            if isinstance(node, ast.If) and (taken := _taken(node.test, self.platform)) is not None:
                pending.extend(reversed(node.body if taken else node.orelse))
            elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
                pending.extend(reversed(node.body))  # names that a package imports when they are asked for
            elif isinstance(node, ast.If | ast.Try):
                handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
                pending.extend(reversed([*node.body, *handlers, *node.orelse]))
        return found


def _taken(test: ast.expr, platform: str) -> bool | None:
    """Whether a condition holds when the module is imported on a platform; None where it asks for something else."""
    match test:
        case ast.Name(id="TYPE_CHECKING"):
            return False
        case ast.Call(func=ast.Attribute(value=ast.Name(id="current_platform"), attr=question)):
            return platform_answer(question, platform)
        case ast.Compare(
            left=ast.Attribute(value=ast.Name(id="current_platform"), attr="device_type"),
            ops=[ast.Eq()],
            comparators=[ast.Constant(value=kind)],
        ):
            return bool(kind == platform)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _taken(operand, platform)
            return None if inner is None else not inner
        case ast.BoolOp(op=operator, values=values):
            parts = [_taken(value, platform) for value in values]
            decisive = isinstance(operator, ast.Or)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
    return None


def names_defined(statement: ast.stmt) -> list[str]:
    """Names that a statement of a class or module body gives a meaning: a function's, or what is assigned to."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


Question = tuple[str, tuple[Any, ...]]
"""A method of `Symbols`, and its arguments."""


class Symbols:
    """Name lookup over one source tree, for one platform; every file is parsed at most once."""

    def __init__(self, tree: SourceTree, platform: str) -> None:
        self.tree, self.platform = tree, platform
        self._answers: dict[Question, Any] = {}
        self._indexes: dict[str, ModuleIndex | None] = {}
        self._resolved: dict[tuple[str, str], Symbol] = {}

    def index(self, module: str) -> ModuleIndex | None:
        """Index of a module, or None where the tree does not hold it."""
        if module not in self._indexes:
            path = self.tree.path_of(module)
            self._indexes[module] = self._read(module, path) if path else None
        return self._indexes[module]

    def _read(self, module: str, path: Path) -> ModuleIndex:
        text = path.read_text(encoding="utf-8")
        return ModuleIndex(module, text, package=path.name == "__init__.py", platform=self.platform)

    @contextmanager
    def noting(self) -> Iterator[dict[Question, Any]]:
        """Write down what is asked meanwhile about names, with the answers."""
        self._answers = {}
        try:
            yield self._answers
        finally:
            self._answers = {}

    def agrees(self, answers: Mapping[Question, Any]) -> bool:
        """Whether this release gives the same answers."""
        return all(getattr(self, method)(*arguments) == answer for (method, arguments), answer in answers.items())

    def resolve(self, module: str, name: str) -> Symbol:
        """Follow a name through re-exports to its definition."""
        key = (module, name)
        if key not in self._resolved:
            self._resolved[key] = Symbol(module, name, SymbolKind.UNKNOWN)  # for names that lead back here
            self._resolved[key] = self._resolve(module, name)
        self._answers["resolve", key] = self._resolved[key]
        return self._resolved[key]

    def _resolve(self, module: str, name: str) -> Symbol:
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            index = self.index(module)
            if index is None:
                break
            if name in index.classes:
                return Symbol(module, name, SymbolKind.CLASS)
            if name in index.functions:
                return Symbol(module, name, SymbolKind.FUNCTION)
            if name in index.imports and index.imports[name][1]:
                module, name = index.imports[name]
                continue
            if name in index.values:
                return Symbol(module, name, SymbolKind.VALUE)
            if "__getattr__" in index.functions:  # a package that hands on what its submodules hold
                submodules = (item for item in index.imports.values() if item[0].startswith(index.package))
                for origin, own in submodules:
                    if (found := self.resolve(f"{origin}.{own}", name)).kind is not SymbolKind.UNKNOWN:
                        return found
            for star in index.star_imports:
                if (found := self.resolve(star, name)).kind is not SymbolKind.UNKNOWN:
                    return found
            break
        return Symbol(module, name, SymbolKind.UNKNOWN)

    def is_module_class(self, symbol: Symbol) -> bool:
        """Whether a class derives from `torch.nn.Module`."""
        answer = self._answers["is_module_class", (symbol,)] = self._derives_from_module(symbol)
        return answer

    def _derives_from_module(self, symbol: Symbol) -> bool:
        if symbol.name in MODULE_FACTORIES:
            return True
        if symbol.module.split(".")[0] == "torch":
            real = getattr(import_module(symbol.module), symbol.name, None)
            return isinstance(real, type) and issubclass(real, torch.nn.Module)
        if symbol.kind is not SymbolKind.CLASS:
            return False
        index = self.index(symbol.module)
        assert index is not None  # resolve() found the class there
        return any(self.is_module_class(base) for base in self.bases(symbol))

    def defines(self, symbol: Symbol, member: str) -> bool:
        """Whether a class, or an ancestor of it in the source tree, has a member of that name in its body."""
        answer = self._answers["defines", (symbol, member)] = self._has_member(symbol, member)
        return answer

    def _has_member(self, symbol: Symbol, member: str) -> bool:
        index = self.index(symbol.module)
        if index is None or symbol.name not in index.classes:
            return False
        own = {name for statement in index.classes[symbol.name].body for name in names_defined(statement)}
        return member in own or any(self.defines(base, member) for base in self.bases(symbol))

    def bases(self, symbol: Symbol) -> list[Symbol]:
        """Direct bases of a class, each resolved."""
        index = self.index(symbol.module)
        if index is None or symbol.name not in index.classes:
            return []
        return [self._base(index, symbol.name, node) for node in index.classes[symbol.name].bases]

    def _base(self, index: ModuleIndex, name: str, node: ast.expr) -> Symbol:
        if isinstance(node, ast.Name):
            if node.id == name and node.id in index.imports:  # `class X(X)`: the base is the one that was imported
                return self.resolve(*index.imports[node.id])
            return self.resolve(index.module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            origin, own = index.imports.get(node.value.id, (node.value.id, ""))
            return self.resolve(f"{origin}.{own}" if own else origin, node.attr)
        if isinstance(node, ast.Attribute):
            return self.resolve(ast.unparse(node.value), node.attr)
        return Symbol(index.module, ast.unparse(node), SymbolKind.UNKNOWN)
