"""Third pass: which upstream class is what.

From the architectures of a spec, through vLLM's model registry, to the decoder layers: the classes that build both an
attention and a mixture of experts, or a mixture of experts alone beside layers that hold the attention. What a class
*is* follows from what it constructs (`constructs`). Only questions are asked here, so `ast` answers them (libcst takes
20 times as long); rewriting is `emit`'s.
"""

import ast
from dataclasses import dataclass
from functools import cache, lru_cache

from afd_compiler.constructs import Constructs, GlobalName, defaults_of, is_model_class, self_attribute
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.spec import Spec
from afd_compiler.symbols import Symbol, Symbols, names_defined

REGISTRY = "vllm.model_executor.models.registry"
REGISTRY_PACKAGE = "vllm.model_executor.models"
BUILD_REGISTERED = "vllm.model_executor.models.utils.init_vllm_registered_model"
"""What a model calls that is built around another one of the registry, whichever its configuration names."""


@dataclass(frozen=True, slots=True)
class LayerParameter:
    """A constructor parameter whose default is a layer's class, evaluated long before any name is bound."""

    owner: Symbol
    names: tuple[GlobalName, ...]
    """By which the code around the layers builds the owner."""
    parameter: str
    layer: Symbol
    of_causal_lm: bool


@dataclass(frozen=True, slots=True)
class LayerClass:
    """A decoder layer that holds a mixture of experts."""

    symbol: Symbol
    location: Location
    attention_children: tuple[str, ...]
    moe_children: tuple[str, ...]
    dense_children: tuple[str, ...]
    """Attributes that can be a dense FFN and never a mixture of experts."""
    arguments: tuple[str, ...]
    """Keywords that the model's own calls of the layer pass; the other parameters keep their defaults."""
    modules: tuple[tuple[str, tuple[GlobalName, ...]], ...]
    """(attribute, global names of the module classes that it can be) for each submodule of the layer."""
    class_attributes: tuple[tuple[str, str], ...]
    """(submodule, class attribute that holds its class) where the layer builds it by `self.<class attribute>(…)`."""
    default_classes: tuple[tuple[str, str], ...]
    """(submodule, constructor's parameter whose default is its class) where the layer builds it by that parameter."""
    expert_names: tuple[GlobalName, ...]
    """By which the opened modules know the classes of the layer's experts."""
    inner_names: tuple[tuple[str, frozenset[GlobalName]], ...]
    """(submodule, global names that the code of its classes uses): what must keep its meaning while it is built."""
    set_outside: tuple[str, ...]
    """Attributes that the code around the layers sets on other objects, layers perhaps, after they are built."""

    @property
    def name(self) -> str:
        return self.symbol.name

    @property
    def split_children(self) -> tuple[str, ...]:
        """The attributes that set the layer's variants apart: attention and FFN."""
        return (*self.attention_children, *self.moe_children, *self.dense_children)


@dataclass(frozen=True, slots=True)
class FamilyClasses:
    """The decoder layers of a family and what surrounds them."""

    module: str
    """Of the first layer, or of the first class where the layers are those of another registered model."""
    location: Location
    """Of the same."""
    architectures: tuple[tuple[str, Symbol], ...]
    """(architecture, class), in the spec's order."""
    elsewhere: tuple[tuple[str, str], ...]
    """(architecture, where it is) for those that this release and platform take from another file, or do not have."""
    layers: tuple[LayerClass, ...]
    """None where the classes are built around another registered model, which has its own wrapper."""
    registered_names: tuple[GlobalName, ...]
    """By which such classes build that model."""
    layer_names: tuple[tuple[GlobalName, Symbol], ...]
    """(global name, layer) for each name by which code around the layers builds one, those in tables included."""
    layer_tables: tuple[tuple[GlobalName, tuple[tuple[str, Symbol], ...]], ...]
    """(global dictionary, its (key, layer) entries) where code around the layers looks them up by a key."""
    layer_parameters: tuple[LayerParameter, ...]
    layer_attributes: tuple[tuple[Symbol, str, Symbol], ...]
    """(class, its attribute, layer) where a class around the layers holds a layer's class."""
    outer: tuple[Symbol, ...]
    """The classes around the layers up to the causal LMs, and their ancestors in the model files."""
    opened: tuple[str, ...]
    """Modules whose code is executed: those of the layers, of what is around them, and of their ancestors; the first
    layer's first, the others in alphabetical order."""
    model_modules: tuple[tuple[str, tuple[GlobalName, ...]], ...]
    """What model and causal LM build around the layers; all of that belongs to attention."""


def classify(spec: Spec, built: Constructs) -> FamilyClasses:
    """Find the decoder layers behind the spec's architectures; raise `Refused` where there are none."""
    symbols = built.symbols
    registered = registry(symbols)
    found = {name: symbols.resolve(*registered[name]) if name in registered else None for name in spec.architectures}
    here = {name: symbol for name, symbol in found.items() if symbol and is_in(symbol, spec.module)}
    if not here:
        places = ", ".join(f"{name} in {symbol or 'no file'}" for name, symbol in found.items())
        raise Refused(
            RefusalKind.ARCHITECTURE_MISSING,
            at=Location(file_of(spec.module), 1),
            name=spec.module,
            saw=f"vLLM {symbols.tree.release} for {symbols.platform} has {places}",
            do="correct `module` or `architectures` in the spec, or choose another platform",
        )
    roots = list(dict.fromkeys(here.values()))
    reached = built.reachable(roots)
    around_registered = [cls for cls in reached if wraps_registered(built, cls)]
    layers = (
        [] if around_registered and not any(map(built.holds_experts, roots)) else _layers(built, reached, spec.module)
    )
    inside = set(layers or around_registered)
    outer = [cls for cls in reached if cls not in layers and inside & set(built.reachable([cls]))]
    without = [name for name, symbol in here.items() if symbol not in outer]
    around = list(dict.fromkeys(ancestor for cls in outer for ancestor in built.lineage(cls)))
    lineages = [*around, *(ancestor for layer in layers for ancestor in built.lineage(layer))]
    modules = {cls.module for cls in lineages if symbols.is_module_class(cls) or _has_code(cls)}
    first = (layers or roots)[0]
    opened = tuple(sorted(modules, key=lambda module: (module != first.module, module)))
    return FamilyClasses(
        module=first.module,
        location=Location(file_of(first.module), built.node(first).lineno),
        architectures=tuple((name, symbol) for name, symbol in here.items() if name not in without),
        elsewhere=(
            *((name, f"{here[name]}, which has none of these layers") for name in without),
            *((name, str(symbol or "missing")) for name, symbol in found.items() if name not in here),
        ),
        layers=tuple(_layer(built, layer, around, opened) for layer in layers),
        registered_names=() if layers else _registered_names(built, around),
        layer_names=tuple(_layer_names(built, layers, around)),
        layer_tables=tuple(_layer_tables(built, layers, around)),
        layer_parameters=tuple(_layer_parameters(built, layers, around, roots)),
        layer_attributes=tuple(_layer_attributes(built, layers, around)),
        outer=tuple(around),
        opened=opened,
        model_modules=_model_modules(built, outer, {*outer, *layers}),
    )


def _has_code(mixin: Symbol) -> bool:
    """Whether what is no module, but mixed into one, does some of its work; vLLM's interfaces only say what it can."""
    return is_model_class(mixin) and not mixin.module.rpartition(".")[2].startswith("interfaces")


def file_of(module: str) -> str:
    """Path of a module's file as locations show it."""
    return module.replace(".", "/") + ".py"


@lru_cache(maxsize=1)
def registry(symbols: Symbols) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class), as vLLM's model registry has it."""
    index = symbols.index(REGISTRY)
    tables = [node for node in ast.walk(index.tree) if isinstance(node, ast.Dict)] if index else []
    found: dict[str, tuple[str, str]] = {}
    for key, value in (pair for table in tables for pair in zip(table.keys, table.values, strict=True)):
        match key, value:
            case ast.Constant(value=str(name)), ast.Tuple(
                elts=[ast.Constant(value=str(module)), ast.Constant(value=cls)]
            ):
                found[name] = (module if "." in module else f"{REGISTRY_PACKAGE}.{module}", str(cls))
    return found


def wraps_registered(built: Constructs, cls: Symbol) -> bool:
    """Whether a class builds another model of the registry within itself."""
    return bool(_registered_names(built, [cls]))


def _registered_names(built: Constructs, classes: list[Symbol]) -> tuple[GlobalName, ...]:
    names = dict.fromkeys(name for cls in classes for name in built.names_used(cls))
    return tuple(name for name in names if str(built.resolve(name)) == BUILD_REGISTERED)


def is_in(symbol: Symbol, module: str) -> bool:
    """Whether a class is defined in a module, or below it where that is a package with a file per platform."""
    return is_model_class(symbol) and (symbol.module == module or symbol.module.startswith(f"{module}."))


def _layers(built: Constructs, reached: list[Symbol], module: str) -> list[Symbol]:
    both = [cls for cls in reached if _reaches_both(built, reached, cls)]
    layers = [
        cls
        for cls in both
        if built.children(cls, built.is_attention)
        and built.children(cls, built.is_moe)
        and not any(inner in both for inner in built.mentioned(cls) if inner != cls)
    ]
    if not layers:
        # A mixture of experts that is a layer of its own, beside layers that hold the attention.
        innermost = [cls for cls in both if not any(inner in both for inner in built.mentioned(cls) if inner != cls)]
        layers = [
            cls
            for model in innermost
            for cls in built.mentioned(model)
            if built.children(cls, built.is_moe) and not built.children(cls, built.is_attention)
        ]
    if layers:
        return list(dict.fromkeys(layers))
    raise Refused(
        RefusalKind.NO_BOUNDARY,
        at=Location(file_of(module), 1),
        name=module,
        saw="no class that the architectures reach builds both an attention and a mixture of experts",
        do="serve this family unsplit: its experts are built in a way that is not followed",
    )


def _reaches_both(built: Constructs, reached: list[Symbol], cls: Symbol) -> bool:
    inside = [GlobalName(inner.module, inner.name) for inner in built.reachable([cls]) if inner in reached]
    return any(map(built.is_attention, inside)) and any(map(built.is_moe, inside))


def _layer(built: Constructs, layer: Symbol, around: list[Symbol], opened: tuple[str, ...]) -> LayerClass:
    moe = built.children(layer, built.is_moe)
    attention = tuple(name for name in built.children(layer, built.is_attention) if name not in moe)
    dense = tuple(name for name in built.children(layer, built.is_dense) if name not in (*moe, *attention))
    constructs = built.built_by(layer)
    experts = {built.resolve(name) for _, group in built.modules(layer) for name in group if built.is_moe(name)}
    return LayerClass(
        symbol=layer,
        location=Location(file_of(layer.module), built.node(layer).lineno),
        attention_children=attention,
        moe_children=moe,
        dense_children=dense,
        arguments=_arguments(built, layer, around),
        modules=built.modules(layer),
        class_attributes=tuple((item.attribute, item.via) for item in constructs if item.attribute and item.via),
        default_classes=tuple(
            (item.attribute, item.parameter) for item in constructs if item.attribute and item.parameter
        ),
        expert_names=built.names_of({symbol for symbol in experts if is_model_class(symbol)}, opened),
        inner_names=tuple((name, _inner_names(built, group)) for name, group in built.modules(layer)),
        set_outside=tuple(dict.fromkeys(name for cls in around for name in _set_on_others(built.node(cls)))),
    )


@cache
def _set_on_others(node: ast.ClassDef) -> list[str]:
    found = []
    for statement in ast.walk(node):
        match statement:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner), attr=name)]) if owner != "self":
                found.append(name)
    return found


@cache
def _calls_in(node: ast.ClassDef) -> list[ast.Call]:
    return [call for call in ast.walk(node) if isinstance(call, ast.Call)]


def _inner_names(built: Constructs, names: tuple[GlobalName, ...]) -> frozenset[GlobalName]:
    roots = [symbol for name in names if is_model_class(symbol := built.resolve(name))]
    return frozenset(name for cls in built.reachable(roots) for name in built.names_used(cls))


def _arguments(built: Constructs, layer: Symbol, around: list[Symbol]) -> tuple[str, ...]:
    """Parameters that calls of the layer pass; all of them where no call is recognised."""
    found = built.method(layer, "__init__")
    assert found is not None  # the layer was recognised by what its __init__ builds
    arguments = found[1].args
    parameters = [argument.arg for argument in (*arguments.args[1:], *arguments.kwonlyargs)]
    passed: dict[str, None] = {}
    for cls in around:
        for call in _calls_in(built.node(cls)):
            if _calls(built, call, cls, layer):
                given = [*parameters[: len(call.args)], *(word.arg for word in call.keywords if word.arg)]
                passed |= dict.fromkeys(given)
    return tuple(name for name in parameters if name in (passed or parameters))


def _calls(built: Constructs, call: ast.Call, cls: Symbol, layer: Symbol) -> bool:
    """Whether a call in a class's source builds the layer, by its name or by a class attribute that holds it."""
    if isinstance(call.func, ast.Name):
        return built.resolve(GlobalName(cls.module, call.func.id)) == layer
    held = (attribute := self_attribute(call.func)) and built.index(cls.module).class_attribute(cls.name, attribute)
    return bool(held) and built.resolve(GlobalName(cls.module, held or "")) == layer


def _layer_names(built: Constructs, layers: list[Symbol], around: list[Symbol]) -> list[tuple[GlobalName, Symbol]]:
    names = dict.fromkeys(name for cls in around for name in built.names_used(cls))
    return [(name, symbol) for name in names if (symbol := built.resolve(name)) in layers]


def _layer_parameters(
    built: Constructs, layers: list[Symbol], around: list[Symbol], causal_lms: list[Symbol]
) -> list[LayerParameter]:
    causal = {ancestor for cls in causal_lms for ancestor in built.lineage(cls)}
    inits = ((cls, built.index(cls.module).method(cls.name, "__init__")) for cls in around)
    return [
        LayerParameter(cls, _names_of(built, cls, around), parameter, symbol, cls in causal)
        for cls, init in inits
        if init
        for parameter, default in defaults_of(init)
        if isinstance(default, ast.Name) and (symbol := built.resolve(GlobalName(cls.module, default.id))) in layers
    ]


def _names_of(built: Constructs, cls: Symbol, around: list[Symbol]) -> tuple[GlobalName, ...]:
    names = dict.fromkeys(name for user in around for name in built.names_used(user))
    return tuple(name for name in names if built.resolve(name) == cls)


def _layer_tables(
    built: Constructs, layers: list[Symbol], around: list[Symbol]
) -> list[tuple[GlobalName, tuple[tuple[str, Symbol], ...]]]:
    found = []
    for name in dict.fromkeys(name for cls in around for name in built.names_used(cls)):
        table = built.index(name.module).tables.get(name.name, {})
        entries = [(key, built.resolve(GlobalName(name.module, held))) for key, held in table.items()]
        if held := tuple((key, symbol) for key, symbol in entries if symbol in layers):
            found.append((name, held))
    return found


def _layer_attributes(
    built: Constructs, layers: list[Symbol], around: list[Symbol]
) -> list[tuple[Symbol, str, Symbol]]:
    return [
        (cls, target, symbol)
        for cls in around
        for statement in built.node(cls).body
        for target in names_defined(statement)
        if (held := built.index(cls.module).class_attribute(cls.name, target))
        and (symbol := built.resolve(GlobalName(cls.module, held))) in layers
    ]


def _model_modules(
    built: Constructs, outer: list[Symbol], split: set[Symbol]
) -> tuple[tuple[str, tuple[GlobalName, ...]], ...]:
    """Modules built beside the layers: by a class that builds layers, or by one that reaches such a class."""
    found: dict[str, dict[GlobalName, None]] = {}
    for cls in outer:
        for attribute, names in built.modules(cls):
            plain = [name for name in names if built.resolve(name) not in split and name.name != "PPMissingLayer"]
            if plain:
                found.setdefault(attribute, {}).update(dict.fromkeys(plain))
    return tuple((attribute, tuple(names)) for attribute, names in sorted(found.items()))
