"""Third pass: which upstream class is what.

From the architectures of a spec, through vLLM's model registry, to the decoder layer: the class that builds both
an attention and a mixture of experts. What a class *is* follows from what it constructs, never from a name given
to it: it is attention if it reaches one of vLLM's attention primitives, MoE if it reaches a fused-MoE primitive.
Only questions are asked here, so `ast` answers them (libcst takes 20 times as long); rewriting is `emit`'s.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.spec import Spec
from afd_compiler.symbols import ModuleIndex, Symbol, SymbolKind, Symbols

REGISTRY = "vllm.model_executor.models.registry"
REGISTRY_PACKAGE = "vllm.model_executor.models"
ATTENTION_PACKAGES = (
    "vllm.model_executor.layers.attention",
    "vllm.model_executor.layers.mla",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.kda",
    "vllm.attention",
)
"""Where vLLM keeps its attention primitives and mixers."""
FUSED_MOE_PACKAGE = "vllm.model_executor.layers.fused_moe"
FUSED_MOE = ("FusedMoEFactory", "FusedMoE", "SharedFusedMoE")
"""Exports of that package that build experts: from 0.29.0 on, before it, and beside it in 0.19.1."""


@dataclass(frozen=True, slots=True)
class Construct:
    """One place in a method where a class may be built: `self.attribute = name(…)`, or without an attribute."""

    attribute: str | None
    names: tuple[str, ...]
    """Global names that the called expression can stand for, aliases followed."""
    line: int
    via: str | None = None
    """The class attribute that holds the class, where it is called by `self.<class attribute>(…)`."""


@dataclass(frozen=True, slots=True)
class LayerParameter:
    """A constructor parameter whose default is the layer's class, evaluated long before any name is bound."""

    class_name: str
    parameter: str
    of_causal_lm: bool


@dataclass(frozen=True, slots=True)
class LayerClasses:
    """A decoder layer and what surrounds it, all in one upstream module."""

    module: str
    file: str
    architectures: tuple[tuple[str, str], ...]
    """(architecture, class in the module), in the spec's order."""
    elsewhere: tuple[tuple[str, str], ...]
    """(architecture, where it is) for those that this release and platform take from another file, or do not have."""
    layer: str
    location: Location
    attention_children: tuple[str, ...]
    ffn_children: tuple[str, ...]
    layer_arguments: tuple[str, ...]
    """Keywords that the model's own call of the layer passes; the other parameters keep their defaults."""
    layer_modules: tuple[tuple[str, tuple[str, ...]], ...]
    """(attribute, global names of the module classes that it can be) for each submodule of the layer."""
    class_attributes: tuple[tuple[str, str], ...]
    """(submodule, class attribute that holds its class) where the layer builds it by `self.<class attribute>(…)`."""
    layer_parameters: tuple[LayerParameter, ...]
    """Constructors around the layers that take the layer's class as an argument."""
    outer: tuple[str, ...]
    """The layer's class, the classes around it up to the causal LMs, and their ancestors in the module."""
    model_modules: tuple[tuple[str, tuple[str, ...]], ...]
    """The same for what model and causal LM build around the layers; all of that belongs to attention."""

    @property
    def split_children(self) -> tuple[str, ...]:
        """The attributes that set the layer's variants apart: attention and FFN."""
        return (*self.attention_children, *self.ffn_children)


def classify(spec: Spec, symbols: Symbols) -> LayerClasses:
    """Find the decoder layer behind the spec's architectures; raise `Refused` where there is not exactly one."""
    registered = _registry(symbols)
    found = {name: symbols.resolve(*registered[name]) if name in registered else None for name in spec.architectures}
    here = {name: symbol for name, symbol in found.items() if symbol and symbol.module == spec.module}
    index = symbols.index(spec.module)
    file = spec.module.replace(".", "/") + ".py"
    if index is None or not here:
        places = ", ".join(f"{name} in {symbol or 'no file'}" for name, symbol in found.items())
        raise Refused(
            RefusalKind.ARCHITECTURE_MISSING,
            at=Location(file, 1),
            name=spec.module,
            saw=f"vLLM {symbols.tree.release} for {symbols.platform} has {places}",
            do="correct `module` or `architectures` in the spec, or choose another platform",
        )
    question = _ClassQuestions(index, symbols)
    reached = question.reachable([symbol.name for symbol in here.values()])
    layer = _the_layer(question, reached, Location(file, 1))
    constructs = question.constructs(layer)
    return LayerClasses(
        module=spec.module,
        file=file,
        architectures=tuple((name, symbol.name) for name, symbol in here.items()),
        elsewhere=tuple((name, str(symbol or "missing")) for name, symbol in found.items() if name not in here),
        layer=layer,
        location=Location(file, index.classes[layer].lineno),
        attention_children=question.children(constructs, question.is_attention),
        ffn_children=question.children(constructs, question.is_moe),
        layer_arguments=_layer_arguments(question, reached, layer),
        class_attributes=tuple((item.attribute, item.via) for item in constructs if item.attribute and item.via),
        layer_parameters=_layer_parameters(question, reached, layer, {symbol.name for symbol in here.values()}),
        layer_modules=question.modules(constructs),
        outer=_outer(question, reached, layer),
        model_modules=_model_modules(question, reached, layer),
    )


def _registry(symbols: Symbols) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class), as vLLM's model registry has it."""
    registry = symbols.index(REGISTRY)
    tables = [node for node in ast.walk(registry.tree) if isinstance(node, ast.Dict)] if registry else []
    found: dict[str, tuple[str, str]] = {}
    for key, value in (pair for table in tables for pair in zip(table.keys, table.values, strict=True)):
        match key, value:
            case ast.Constant(value=str(name)), ast.Tuple(
                elts=[ast.Constant(value=str(module)), ast.Constant(value=cls)]
            ):
                found[name] = (module if "." in module else f"{REGISTRY_PACKAGE}.{module}", str(cls))
    return found


class _ClassQuestions:
    """Answers about the classes of one module."""

    def __init__(self, index: ModuleIndex, symbols: Symbols) -> None:
        self.index, self.symbols = index, symbols
        self._constructs: dict[str, list[Construct]] = {}

    def lineage(self, name: str) -> list[str]:
        """The class and its ancestors within the module, nearest first."""
        bases = (symbol for symbol in self.symbols.bases(Symbol(self.index.module, name, SymbolKind.CLASS)))
        local = [symbol.name for symbol in bases if symbol.module == self.index.module]
        return [name, *(ancestor for base in local for ancestor in self.lineage(base))]

    def reachable(self, roots: list[str]) -> list[str]:
        """Classes of the module that the roots mention, directly or through others, in order of discovery."""
        found = dict.fromkeys(roots)
        pending = list(roots)
        while pending:
            for node in ast.walk(self.index.classes[pending.pop(0)]):
                if isinstance(node, ast.Name) and node.id in self.index.classes and node.id not in found:
                    found[node.id] = None
                    pending.append(node.id)
        return list(found)

    def method(self, class_name: str, method: str) -> ast.FunctionDef | None:
        """The nearest definition of a method in the class's lineage."""
        found = (self.index.method(name, method) for name in self.lineage(class_name))
        return next((node for node in found if node), None)

    def constructs(self, class_name: str) -> list[Construct]:
        """What the class's `__init__` builds."""
        if class_name not in self._constructs:
            init = self.method(class_name, "__init__")
            self._constructs[class_name] = (
                [*map(partial(self._named, class_name), _constructs_in(init))] if init else []
            )
        return self._constructs[class_name]

    def _named(self, class_name: str, item: Construct) -> Construct:
        """Say what `self.X(…)` stands for: a class that a class attribute holds, or what a method returns."""
        if item.via is None:
            return item
        if method := self.method(class_name, item.via):
            returned = (node.value for node in ast.walk(method) if isinstance(node, ast.Return))
            names = [_callee_names(value, _aliases(method)) for value in returned if isinstance(value, ast.Call)]
            return replace(item, names=tuple(name for group in names for name in group), via=None)
        held = (self._class_attribute(name, item.via) for name in self.lineage(class_name))
        name = next((name for name in held if name), None)
        return replace(item, names=(name,)) if name else replace(item, via=None)

    def _class_attribute(self, class_name: str, attribute: str) -> str | None:
        for node in self.index.classes[class_name].body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=held)) if name == attribute:
                    return held
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Name(id=held)) if name == attribute:
                    return held
        return None

    def children(self, constructs: list[Construct], holds: Callable[[str], bool]) -> tuple[str, ...]:
        """Attributes for which one of the classes they can be answers yes."""
        hits = (item.attribute for item in constructs if item.attribute and any(holds(name) for name in item.names))
        return tuple(dict.fromkeys(hits))

    def modules(self, constructs: list[Construct]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Attributes that can be modules, with the names of the classes that they can be."""
        found: dict[str, dict[str, None]] = {}
        for item in constructs:
            names = [name for name in item.names if self.is_module(name)]
            if item.attribute and names:
                found.setdefault(item.attribute, {}).update(dict.fromkeys(names))
        return tuple((attribute, tuple(names)) for attribute, names in found.items())

    def is_attention(self, name: str) -> bool:
        return self._reaches(name, lambda symbol: symbol.module.startswith(ATTENTION_PACKAGES), frozenset())

    def is_moe(self, name: str) -> bool:
        def builds_experts(symbol: Symbol) -> bool:
            return symbol.module.startswith(FUSED_MOE_PACKAGE) and symbol.name in FUSED_MOE

        return self._reaches(name, builds_experts, frozenset())

    def _reaches(self, name: str, primitive: Callable[[Symbol], bool], seen: frozenset[str]) -> bool:
        if name in seen:
            return False
        if name not in self.index.classes:
            return primitive(self.symbols.resolve(self.index.module, name))
        inner = (callee for item in self.constructs(name) for callee in item.names)
        return any(self._reaches(callee, primitive, seen | {name}) for callee in inner)

    def is_module(self, name: str) -> bool:
        return self.symbols.is_module_class(self.symbols.resolve(self.index.module, name))


def _constructs_in(function: ast.FunctionDef) -> Iterator[Construct]:
    aliases = _aliases(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.IfExp):
            targets = [name for target in node.targets if (name := _self_attribute(target))]
            for call in _alternatives(node.value):
                if isinstance(call, ast.Call):
                    names, via = _callee_names(call, aliases), _self_attribute(call.func)
                    yield from (Construct(target, names, call.lineno, via) for target in targets)
        elif isinstance(node, ast.Call):
            yield Construct(None, _callee_names(node, aliases), node.lineno)


def _aliases(function: ast.FunctionDef) -> dict[str, tuple[str, ...]]:
    """Local names that stand for global ones: `cls = A`, `cls = A if … else B`, and so on for each assignment."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        names = tuple(value.id for value in _alternatives(node.value) if isinstance(value, ast.Name))
        if names:
            found[node.targets[0].id] = tuple(dict.fromkeys(found.get(node.targets[0].id, ()) + names))
    return found


def _alternatives(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def _callee_names(call: ast.Call, aliases: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if not isinstance(call.func, ast.Name):
        return ()
    return aliases.get(call.func.id, (call.func.id,))


def _self_attribute(node: ast.expr) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _the_layer(question: _ClassQuestions, reached: list[str], at: Location) -> str:
    layers = [
        name
        for name in reached
        if question.children(constructs := question.constructs(name), question.is_attention)
        and question.children(constructs, question.is_moe)
        and not _holds_layers(question, constructs, reached)
    ]
    if len(layers) == 1:
        return layers[0]
    if layers:
        lines = ", ".join(f"{name} (line {question.index.classes[name].lineno})" for name in layers)
        raise Refused(
            RefusalKind.AMBIGUOUS_BOUNDARY,
            at=at,
            name=question.index.module,
            saw=f"several classes build both attention and a mixture of experts: {lines}",
            do="give each its own spec, naming the architectures that use it",
        )
    raise Refused(
        RefusalKind.NO_BOUNDARY,
        at=at,
        name=question.index.module,
        saw="no class that the architectures reach builds both an attention and a mixture of experts",
        do="name the module that defines the decoder layer in the spec",
    )


def _holds_layers(question: _ClassQuestions, constructs: list[Construct], reached: list[str]) -> bool:
    """A model or causal LM reaches both kinds too, but through another class that does."""
    inner = {name for item in constructs for name in item.names if name in reached}
    return any(question.is_attention(name) and question.is_moe(name) for name in inner)


def _layer_arguments(question: _ClassQuestions, reached: list[str], layer: str) -> tuple[str, ...]:
    init = question.method(layer, "__init__")
    assert init is not None  # the layer was recognised by what its __init__ builds
    parameters = [argument.arg for argument in (*init.args.args[1:], *init.args.kwonlyargs)]
    passed: dict[str, None] = {}
    for name in reached:
        own = question.method(name, "__init__")
        called = {layer, *(_parameters_holding(layer, own) if own else ())}
        for node in ast.walk(question.index.classes[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in called:
                given = [*parameters[: len(node.args)], *(word.arg for word in node.keywords if word.arg)]
                passed |= dict.fromkeys(given)
    if passed:
        return tuple(parameter for parameter in parameters if parameter in passed)
    raise Refused(
        RefusalKind.NO_BOUNDARY,
        at=Location(question.index.module.replace(".", "/") + ".py", question.index.classes[layer].lineno),
        name=layer,
        saw="no class that the architectures reach builds this layer under its own name",
        do="name the architectures that build it",
    )


def _layer_parameters(
    question: _ClassQuestions, reached: list[str], layer: str, causal_lms: set[str]
) -> tuple[LayerParameter, ...]:
    causal = {ancestor for name in causal_lms for ancestor in question.lineage(name)}
    methods = ((name, question.index.method(name, "__init__")) for name in reached)
    return tuple(
        LayerParameter(name, parameter, name in causal)
        for name, init in methods
        if init
        for parameter in _parameters_holding(layer, init)
    )


def _parameters_holding(name: str, function: ast.FunctionDef) -> list[str]:
    """Parameters of which a class is the default."""
    arguments = function.args
    pairs = [*zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)]
    pairs += [
        (argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default
    ]
    return [argument.arg for argument, default in pairs if isinstance(default, ast.Name) and default.id == name]


def _outer(question: _ClassQuestions, reached: list[str], layer: str) -> tuple[str, ...]:
    around = [layer, *(name for name in reached if layer in question.reachable([name]))]
    return tuple(dict.fromkeys(ancestor for name in around for ancestor in question.lineage(name)))


def _model_modules(
    question: _ClassQuestions, reached: list[str], layer: str
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Modules built beside the layers: by a class that builds layers, or by one that reaches such a class."""
    outer = [name for name in reached if name != layer and layer in question.reachable([name])]
    found: dict[str, tuple[str, ...]] = {}
    for owner in outer:
        for attribute, names in question.modules(question.constructs(owner)):
            plain = tuple(name for name in names if name not in outer and name != "PPMissingLayer")
            if plain:
                found[attribute] = plain
    return tuple(sorted(found.items()))
