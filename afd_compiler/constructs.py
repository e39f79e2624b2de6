"""What classes build, read off their source: the questions that `classes` decides by.

A class is attention if it builds one of vLLM's attention primitives, MoE if it builds a fused-MoE primitive, a dense
FFN if it is neither and builds linear layers; directly or through other classes of the model files, never by a name
given to it.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from afd_compiler.symbols import ModuleIndex, Symbol, SymbolKind, Symbols, names_defined

MODEL_PACKAGES = ("vllm.model_executor.models.", "vllm.models.")
"""Where vLLM keeps its models; classes from elsewhere are not looked into."""
ATTENTION_PACKAGES = (
    "vllm.model_executor.layers.attention",
    "vllm.model_executor.layers.mla",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.kda",
    "vllm.attention",
)
"""Where vLLM keeps its attention primitives and mixers."""
FUSED_MOE_PACKAGE = "vllm.model_executor.layers.fused_moe"
FUSED_MOE = ("FusedMoEFactory", "FusedMoE", "SharedFusedMoE", "fused_experts")
"""Exports of that package that build experts: from 0.29.0 on, before it, and beside it in 0.19.1; last, what computes
experts that a model holds itself."""
CONTAINERS = ("ModuleList", "Sequential")
LINEAR_PACKAGE = "vllm.model_executor.layers.linear"


@dataclass(frozen=True, slots=True, order=True)
class GlobalName:
    """A global name as the code of one module sees it."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Construct:
    """One place in a constructor where a class may be built: `self.attribute = name(…)`, or without an attribute."""

    attribute: str | None
    names: tuple[GlobalName, ...]
    """Global names that the called expression can stand for, aliases followed."""
    line: int
    via: str | None = None
    """The class attribute that holds the class, where it is called by `self.<class attribute>(…)`."""
    parameter: str | None = None
    """The constructor's parameter whose default is the class, where it is called by the parameter's name."""


class Constructs:
    """Answers about classes of the model files; each is worked out once."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self._built: dict[Symbol, tuple[Construct, ...]] = {}
        self._used: dict[Symbol, tuple[GlobalName, ...]] = {}
        self._lineages: dict[Symbol, list[Symbol]] = {}
        self._reaches_kind: dict[tuple[Symbol, Callable[[Symbol], bool]], bool] = {}

    # Where things stand.

    def index(self, module: str) -> ModuleIndex:
        index = self.symbols.index(module)
        assert index is not None  # the module holds a class that was resolved
        return index

    def node(self, cls: Symbol) -> ast.ClassDef:
        return self.index(cls.module).classes[cls.name]

    def resolve(self, name: GlobalName) -> Symbol:
        return self.symbols.resolve(name.module, name.name)

    def lineage(self, cls: Symbol) -> list[Symbol]:
        """The class and its ancestors within the model files, nearest first."""
        if cls not in self._lineages:
            parents = filter(is_model_class, self.symbols.bases(cls))
            self._lineages[cls] = list(
                dict.fromkeys([cls, *(base for parent in parents for base in self.lineage(parent))])
            )
        return self._lineages[cls]

    def method(self, cls: Symbol, name: str) -> tuple[Symbol, ast.FunctionDef] | None:
        """The nearest definition of a method in the class's lineage, and the class that holds it."""
        found = ((owner, self.index(owner.module).method(owner.name, name)) for owner in self.lineage(cls))
        return next(((owner, node) for owner, node in found if node), None)

    def reachable(self, roots: list[Symbol]) -> list[Symbol]:
        """Classes of the model files that the roots mention, directly or through others, in order of discovery."""
        found = dict.fromkeys(roots)
        pending = list(roots)
        while pending:
            for cls in self.mentioned(pending.pop(0)):
                if cls not in found:
                    found[cls] = None
                    pending.append(cls)
        return list(found)

    def mentioned(self, cls: Symbol) -> list[Symbol]:
        """Classes of the model files that a class's live code uses: builds, passes on or keeps in a table."""
        return [found for name in self.names_used(cls) if is_model_class(found := self.resolve(name))]

    def names_used(self, cls: Symbol) -> tuple[GlobalName, ...]:
        """Global names that a class's code uses, in what it inherits too, and in the tables that it names."""
        if cls not in self._used:
            self._used[cls] = self._names_used(cls)
        return self._used[cls]

    def _names_used(self, cls: Symbol) -> tuple[GlobalName, ...]:
        names: dict[GlobalName, None] = {}
        for owner, statement in self._live(cls):
            index = self.index(owner.module)
            for name in filter(index.names.__contains__, _used_in(statement)):
                within = [name, *index.tables.get(name, {}).values()]
                names |= dict.fromkeys(GlobalName(owner.module, item) for item in within)
        return tuple(names)

    def _live(self, cls: Symbol) -> Iterator[tuple[Symbol, ast.stmt]]:
        """Statements of the class and its ancestors that nothing nearer replaces."""
        replaced: dict[str, str] = {}  # name -> the ancestor up to which it is replaced, "" for all
        for owner in self.lineage(cls):
            own: dict[str, str] = {}
            for statement in self.node(owner).body:
                name = next(iter(names_defined(statement)), None)
                if name not in replaced:
                    yield owner, statement
                if name and (after := _super_of(statement, owner)) != owner.name:
                    own[name] = after or ""
            replaced = {name: last for name, last in replaced.items() if last != owner.name} | {
                name: last for name, last in own.items() if name not in replaced
            }

    def names_of(self, classes: set[Symbol], modules: Iterable[str]) -> tuple[GlobalName, ...]:
        """By which global names some modules know some classes."""
        names = (GlobalName(module, name) for module in modules for name in sorted(self.index(module).names))
        return tuple(name for name in names if self.resolve(name) in classes)

    # What a class builds.

    def built_by(self, cls: Symbol) -> tuple[Construct, ...]:
        """What the class's `__init__` builds, and those of its ancestors that it calls."""
        if cls not in self._built:
            self._built[cls] = tuple(self._built_from(cls, cls))
        return self._built[cls]

    def _built_from(self, cls: Symbol, start: Symbol) -> Iterator[Construct]:
        if (found := self.method(start, "__init__")) is None:
            return
        owner, init = found
        if (after := _super_of(init, owner)) is not None:
            lineage = self.lineage(owner)
            skipped = next((position for position, item in enumerate(lineage) if item.name == after), 0)
            for parent in lineage[skipped + 1 : skipped + 2]:
                yield from self._built_from(cls, parent)
        for item in _constructs_in(init, self.index(owner.module)):
            yield self._named(cls, item)
        for name in _helpers_of(init):
            if helper := self.method(cls, name):
                yield from (self._named(cls, item) for item in _constructs_in(helper[1], self.index(helper[0].module)))

    def _named(self, cls: Symbol, item: Construct) -> Construct:
        """Say what `self.X(…)` stands for: a class that a class attribute holds, or what a method returns."""
        if item.via is None:
            return item
        if found := self.method(cls, item.via):
            owner, method = found
            index = self.index(owner.module)
            returned = (node.value for node in ast.walk(method) if isinstance(node, ast.Return))
            calls = [
                _callees(value, _aliases(method, index), index) for value in returned if isinstance(value, ast.Call)
            ]
            return replace(item, names=tuple(name for group in calls for name in group), via=None)
        held = (
            GlobalName(owner.module, name)
            for owner in self.lineage(cls)
            if (name := self.index(owner.module).class_attribute(owner.name, item.via))
        )
        nearest = next(held, None)
        return replace(item, names=(nearest,)) if nearest else replace(item, via=None)

    def children(self, cls: Symbol, holds: Callable[[GlobalName], bool]) -> tuple[str, ...]:
        """Attributes for which one of the classes they can be answers yes."""
        hits = (item.attribute for item in self.built_by(cls) if item.attribute and any(map(holds, item.names)))
        return tuple(dict.fromkeys(hits))

    def modules(self, cls: Symbol) -> tuple[tuple[str, tuple[GlobalName, ...]], ...]:
        """Attributes that can be modules, with the names of the classes that they can be."""
        found: dict[str, dict[GlobalName, None]] = {}
        for item in self.built_by(cls):
            names = [name for name in item.names if self.symbols.is_module_class(self.resolve(name))]
            if item.attribute and names:
                found.setdefault(item.attribute, {}).update(dict.fromkeys(names))
        return tuple((attribute, tuple(names)) for attribute, names in found.items())

    # What a class is.

    def is_attention(self, name: GlobalName) -> bool:
        return self._reaches(name, _is_attention)

    def is_moe(self, name: GlobalName) -> bool:
        return self._reaches(name, _is_fused_moe)

    def holds_experts(self, cls: Symbol) -> bool:
        """Whether a class, or one of the model files that it reaches, builds a mixture of experts."""
        return any(self.is_moe(GlobalName(found.module, found.name)) for found in self.reachable([cls]))

    def is_dense(self, name: GlobalName) -> bool:
        """Whether a class of the model files builds linear layers, and neither attention nor experts."""
        others = self.is_attention(name) or self.is_moe(name)
        return not others and is_model_class(self.resolve(name)) and self._reaches(name, _is_linear)

    def _reaches(self, name: GlobalName, primitive: Callable[[Symbol], bool]) -> bool:
        """Whether a class is such a primitive, or is made of one."""
        symbol = self.resolve(name)
        key = (symbol, primitive)
        if key not in self._reaches_kind:
            self._reaches_kind[key] = any(map(primitive, self._made_of(symbol)))
        return self._reaches_kind[key]

    def _made_of(self, symbol: Symbol) -> Iterator[Symbol]:
        """The symbol; of a class of the model files also what it builds, to any depth, with the ancestors of all and
        the functions that they call."""
        seen: set[Symbol] = set()
        pending = [symbol]
        while pending:
            if (cls := pending.pop()) in seen:
                continue
            seen.add(cls)
            yield cls
            if is_model_class(cls):
                yield from (base for owner in self.lineage(cls) for base in self.symbols.bases(owner))
                yield from self._functions_used(cls)
                pending += [self.resolve(callee) for item in self.built_by(cls) for callee in item.names]

    def _functions_used(self, cls: Symbol) -> Iterator[Symbol]:
        symbols = (self.resolve(name) for name in self.names_used(cls))
        return (symbol for symbol in symbols if symbol.kind is SymbolKind.FUNCTION)


def is_model_class(symbol: Symbol) -> bool:
    """Whether a symbol is a class of vLLM's model files."""
    return symbol.kind is SymbolKind.CLASS and symbol.module.startswith(MODEL_PACKAGES)


def self_attribute(node: ast.expr) -> str | None:
    """`X` of `self.X`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def defaults_of(function: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    """(parameter, default) of a function, in order."""
    arguments = function.args
    with_default = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [*zip(with_default, arguments.defaults, strict=True)]
    pairs += [(arg, value) for arg, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
    return [(argument.arg, default) for argument, default in pairs]


def _is_attention(symbol: Symbol) -> bool:
    return symbol.module.startswith(ATTENTION_PACKAGES)


def _is_fused_moe(symbol: Symbol) -> bool:
    return symbol.module.startswith(FUSED_MOE_PACKAGE) and symbol.name in FUSED_MOE


def _is_linear(symbol: Symbol) -> bool:
    return symbol.module.startswith(LINEAR_PACKAGE)


@cache
def _used_in(statement: ast.stmt) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_used_names(statement)))


def _used_names(node: ast.AST) -> Iterator[str]:
    """Names that are evaluated, but for annotations and questions about a class."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass" | "cast" | "super")):
            return
        case ast.Call(func=ast.Attribute(attr="cast")) | ast.Attribute(value=ast.Name()):
            return  # of a class's attribute the class itself is not built
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _used_names(child)


@cache
def _super_of(method: ast.stmt, owner: Symbol) -> str | None:
    """The class after which `super()` looks, where the method uses it."""
    for node in ast.walk(method):
        match node:
            case ast.Call(func=ast.Name(id="super"), args=args):
                return args[0].id if args and isinstance(args[0], ast.Name) else owner.name
    return None


def _constructs_in(function: ast.FunctionDef, index: ModuleIndex) -> Iterator[Construct]:
    aliases = _aliases(function, index)
    parameters = dict(_default_names(function)) if function.name == "__init__" else {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call | ast.IfExp):
            places = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [name for target in places if (name := self_attribute(target))]
            for call in _calls_that_build(node.value):
                if isinstance(call, ast.Call):
                    names, via = _callees(call, aliases, index), self_attribute(call.func)
                    named = call.func.id if isinstance(call.func, ast.Name) else ""
                    parameter = named if named in parameters else None
                    yield from (Construct(target, names, call.lineno, via, parameter) for target in targets)
        elif isinstance(node, ast.Call):
            yield Construct(None, _callees(node, aliases, index), node.lineno)


def _calls_that_build(value: ast.expr) -> Iterator[ast.expr]:
    """The values of `a if … else b`, and what a list of modules is made of."""
    for item in alternatives(value):
        match item:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in CONTAINERS:
                yield from (node for argument in item.args for node in ast.walk(argument) if isinstance(node, ast.Call))
            case _:
                yield item


def _helpers_of(init: ast.FunctionDef) -> list[str]:
    """Methods of its own that a constructor calls as statements."""
    calls = (node.value for node in ast.walk(init) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    return list(dict.fromkeys(name for call in calls if (name := self_attribute(call.func))))


def _default_names(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """(parameter, global name that is its default)."""
    return [(name, value.id) for name, value in defaults_of(function) if isinstance(value, ast.Name)]


def _aliases(function: ast.FunctionDef, index: ModuleIndex) -> dict[str, tuple[GlobalName, ...]]:
    """Local names that stand for global ones: `cls = A`, `cls = A if … else B`, `cls = TABLE[…]`, `cls, _ = f(…)`."""
    found = {local: (GlobalName(index.module, name),) for local, name in _default_names(function)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or node.value is None:
            continue
        match node.targets[0]:
            case ast.Name(id=local) | ast.Tuple(elts=[ast.Name(id=local), *_]):
                names = [name for value in alternatives(node.value) for name in _stands_for(value, index)]
                found[local] = tuple(dict.fromkeys((*found.get(local, ()), *names)))
    return {local: names for local, names in found.items() if names}


def _stands_for(value: ast.expr, index: ModuleIndex) -> list[GlobalName]:
    match value:
        case ast.Name(id=name):
            return [GlobalName(index.module, name)]
        case ast.Subscript(value=ast.Name(id=table)):
            return [GlobalName(index.module, name) for name in index.tables.get(table, {}).values()]
        case ast.Call(func=ast.Name(id=function)) if function in index.functions:
            return [GlobalName(index.module, name) for name in index.names_returned(function)]
    return []


def alternatives(value: ast.expr) -> list[ast.expr]:
    """The values of `a if … else b`, or the value itself."""
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def _callees(call: ast.Call, aliases: dict[str, tuple[GlobalName, ...]], index: ModuleIndex) -> tuple[GlobalName, ...]:
    match call.func:
        case ast.Name(id=name):
            return aliases.get(name, (GlobalName(index.module, name),))
        case ast.Call() | ast.Subscript():
            return tuple(_stands_for(call.func, index))
    return ()
