"""Part of the proof: a role's whole model can be built wherever upstream's can, and holds what the role owns.

Upstream's causal LM and model constructors are executed symbolically, upstream's own and then the emitted roles' under
the same answers, with one layer of each kind standing for all of them; a registered model that they are built around is
one layer, which the role's wrapper of that model splits. The layer's own questions are answered as in one
variant for each kind of layer; of the others `MOST_PATHS` combinations are tried for the first kind, since the code
around layers seldom asks of which kind they are, and `FEW_PATHS` for each other one.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import torch

from afd_compiler import names
from afd_compiler.classes import BUILD_REGISTERED, FamilyClasses, LayerClass
from afd_compiler.diagnostics import RefusalKind, Refused
from afd_compiler.sandbox import Sandbox
from afd_compiler.symbols import MODULE_FACTORIES, Symbol, Symbols
from afd_compiler.trace import Trace, UpstreamRaised, other_paths, tracing
from afd_compiler.tracer import LayerTracer
from afd_compiler.verify import RUNTIME_MODULE

MOST_PATHS, FEW_PATHS, MOST_TRIES = 12, 4, 40
REGISTERED = "RegisteredModel"
PART_OF = "afd_runtime.parts.part_architectures"
"""What of the runtime turns the name of a registered model into that of a role's part of it."""
INITIALIZE = "vllm.model_executor.model_loader.utils.initialize_model"
UTILS = "vllm.model_executor.models.utils"


@dataclass(frozen=True, slots=True)
class Setting:
    """A class that an architecture names, and answers under which upstream's own constructor succeeds."""

    model: Symbol
    answers: tuple[tuple[str, bool], ...]
    experts: bool
    """Whether its layers hold experts; layers that do not may be attention's altogether."""
    registered: tuple[str, ...]
    """What each registered model in it is built from."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Where upstream's models can be built, and what their constructors read off the layers' submodules."""

    found: tuple[Setting, ...]
    read: Mapping[str, tuple[str, ...]]
    """Role -> attributes of what it does not own: on attention of FFNs, on FFN of attentions."""
    sandbox: Sandbox
    """Where they were built."""


def find_settings(classes: FamilyClasses, symbols: Symbols, traces: Mapping[LayerClass, tuple[Trace, ...]]) -> Settings:
    """Build upstream's own models symbolically; raise `Refused` where none can be followed."""
    sandbox = _sandbox(classes, symbols)
    natives = _splits(sandbox, classes)
    found: list[Setting] = []
    read: dict[str, dict[str, None]] = {role: {} for role in names.ROLES}
    read["attention"] |= dict.fromkeys(_passed_on(traces))
    problems: dict[Symbol, str] = {}
    by_constructor = {sandbox.cls(symbol).__init__: symbol for _, symbol in reversed(classes.architectures)}  # type: ignore[misc]
    known = (name for layer in classes.layers for name in layer.expert_names)
    experts = {symbols.resolve(name.module, name.name).name for name in known} | {*MODULE_FACTORIES, REGISTERED}
    for (position, start), symbol in product(enumerate(_starts(traces)), by_constructor.values()):
        for tracer, built in _tries(sandbox, sandbox.cls(symbol), start, FEW_PATHS if position else MOST_PATHS):
            if isinstance(built, str):
                problems[symbol] = built
            elif any(isinstance(module, natives) for module in built.modules()):
                holds = any(type(module).__name__ in experts for module in built.modules())
                found.append(Setting(symbol, tuple(tracer.answers.items()), holds, _registered(tracer)))
                read["attention"] |= dict.fromkeys(_read_off(tracer, traces, attentions=False))
                read["ffn"] |= dict.fromkeys(_read_off(tracer, traces, attentions=True))
    followed = {setting.model for setting in found if setting.experts}
    for symbol in by_constructor.values():
        if symbol not in followed:
            problem = problems.get(symbol, "it builds no layer with experts on any path that was tried")
            raise _refused(classes, symbol.name, f"upstream's own constructor cannot be followed: {problem}")
    return Settings(tuple(found), {role: tuple(attributes) for role, attributes in read.items()}, sandbox)


def _tries(sandbox: Sandbox, model: type, start: Mapping[str, bool], most: int) -> Iterator[tuple[LayerTracer, Any]]:
    """Upstream's model built on the first paths that succeed, from the answers of one; where a path fails, what is
    wrong with it. What a path asked leads to the next, and the last that a failed one asked comes first."""
    pending = [dict(start)]
    succeeded = 0
    for _ in range(MOST_TRIES):
        if not pending or succeeded == most:
            return
        answers = pending.pop(0)
        tracer = LayerTracer(sandbox, frozenset(), answers, forks=True)
        built: Any
        try:
            built = _construct(sandbox, tracer, model)
            succeeded += 1
        except Refused as reason:
            built = f"{reason.saw} ({reason.at})"
        except UpstreamRaised as raised:
            built = f"it raises {raised}"
        others = list(other_paths(answers, tracer.asked))
        pending = [*others[-1:], *pending, *others[:-1]] if isinstance(built, str) else [*pending, *others]
        yield tracer, built


def check_construction(classes: FamilyClasses, setting: Setting, sandbox: Sandbox, emitted: ModuleType) -> None:
    """Raise `Refused` where a role's constructor fails in a setting, or builds what the role does not own.

    The sandbox is that of `find_settings`, with the emitted module loaded.
    """
    for role in names.ROLES:
        _check_role(sandbox, emitted, role, setting, classes)


def _sandbox(classes: FamilyClasses, symbols: Symbols) -> Sandbox:
    def registered(
        vllm_config: Any, *, prefix: Any = "", hf_config: Any = None, architectures: Any = None
    ) -> torch.nn.Module:
        """Another model of the registry: opaque, and holds a layer of each role where the runtime is loaded."""
        model: torch.nn.Module = sandbox.leaf_class(REGISTERED)(vllm_config, prefix, hf_config, architectures)
        if emitted := sandbox.loaded(RUNTIME_MODULE):
            ffn_layer = type("Layer", (emitted.FFNLayer, torch.nn.Module), {"exchanges": True})
            model.layers = torch.nn.ModuleList([emitted.RemoteFFN(), ffn_layer()])
        return model

    def initialize(*args: Any, model_class: type | None = None, **kwargs: Any) -> torch.nn.Module:
        return (model_class or registered)(*args, **kwargs)

    understood: dict[str, Callable[..., Any]] = {
        f"{UTILS}.make_layers": _make_layers,
        BUILD_REGISTERED: registered,
        INITIALIZE: initialize,
        PART_OF: lambda _, __, named: named,
    }
    sandbox = Sandbox(symbols, classes.opened, understood=understood)
    sandbox.make_leaves([*classes.outer, *(layer.symbol for layer in classes.layers)])
    return sandbox


def _splits(sandbox: Sandbox, classes: FamilyClasses) -> tuple[type, ...]:
    """What upstream's models hold that is split: their layers, or a registered model."""
    return tuple(sandbox.cls(layer.symbol) for layer in classes.layers) or (sandbox.leaf_class(REGISTERED),)


def _starts(traces: Mapping[LayerClass, tuple[Trace, ...]]) -> list[Mapping[str, bool]]:
    """One path for each kind of layer, by the classes of its attention and FFN; those with experts come first. Those of
    different layers agree, or ask other questions."""
    found: dict[tuple[object, ...], Mapping[str, bool]] = {}
    experts = {name.name for layer in traces for name in layer.expert_names}
    for layer, variants in traces.items():
        for trace in variants:
            kind = tuple(child.class_name for name, child in trace.children.items() if name in layer.split_children)
            found.setdefault((experts.isdisjoint(kind), layer, *kind), trace.answers)
    return [found[key] for key in sorted(found, key=lambda key: bool(key[0]))] or [{}]


def _registered(tracer: LayerTracer) -> tuple[str, ...]:
    return tuple(
        f"{item.name}({', '.join(item.arguments)})"
        for item in tracer.children.values()
        if item.class_name == REGISTERED
    )


def _read_off(
    tracer: LayerTracer, traces: Mapping[LayerClass, tuple[Trace, ...]], *, attentions: bool
) -> Iterator[str]:
    """Attributes that were read off the layers' attentions, or off their FFNs."""
    owners = {
        child.class_name
        for layer, variants in traces.items()
        for trace in variants
        for name, child in trace.children.items()
        if name.partition(".")[0]
        in (layer.attention_children if attentions else (*layer.moe_children, *layer.dense_children))
    }
    for node in tracer.graph.nodes:
        owner, _, attribute = str(node.target).partition(".")
        if node.op == "get_attr" and owner in owners:
            yield attribute


def _passed_on(traces: Mapping[LayerClass, tuple[Trace, ...]]) -> Iterator[str]:
    """Attributes of a layer's submodule that its experts are built from."""
    for layer, variants in traces.items():
        for trace in variants:
            words = [text for name in layer.moe_children if (c := trace.children.get(name)) for text in c.arguments]
            for kind in {child.class_name for child in trace.children.values()}:
                yield from (attribute for text in words for attribute in re.findall(rf"self\.{kind}\.(\w+)", text))


def _construct(sandbox: Sandbox, tracer: LayerTracer, model: type) -> Any:
    with tracing(sandbox, tracer, model.__name__):
        return tracer.construct(model, {"vllm_config": tracer.input("vllm_config"), "prefix": ""})


def _check_role(sandbox: Sandbox, emitted: ModuleType, role: str, setting: Setting, classes: FamilyClasses) -> None:
    name = setting.model.name
    tracer = LayerTracer(sandbox, frozenset(), dict(setting.answers), forks=True)
    try:
        built = _construct(sandbox, tracer, getattr(emitted, names.role_class(role, name)))
    except UpstreamRaised as raised:
        if not setting.experts and type(raised.__cause__).__name__ == "NothingSplitError":
            return
        raise _refused(classes, name, f"on the {role} role it raises {raised}") from raised
    except Refused as reason:
        raise _refused(classes, name, f"on the {role} role: {reason.saw} ({reason.at})") from reason
    natives = _splits(sandbox, classes)
    ours = tuple(getattr(emitted, names.role_class(role, layer.name)) for layer in classes.layers) or natives
    layers = [module for module in built.modules() if isinstance(module, natives)]
    if not layers or not all(isinstance(module, ours) for module in layers):
        shown = " or ".join(cls.__name__ for cls in ours)
        raise _refused(classes, name, f"the {role} role does not build {shown} for every layer")
    if (inner := _registered(tracer)) != setting.registered:
        raise _refused(classes, name, f"the {role} role builds {inner} instead of {setting.registered}")
    if role == "ffn" and (kept := _kept_around(sandbox, built, ours)):
        raise _refused(classes, name, f"the ffn role builds {', '.join(kept)}, which attention owns")


def _kept_around(sandbox: Sandbox, built: torch.nn.Module, layers: tuple[type, ...]) -> list[str]:
    """Submodules outside the layers that are really built."""
    missing = sandbox.class_of(sandbox.name(f"{UTILS}.PPMissingLayer"))
    inside = [name for name, module in built.named_modules() if isinstance(module, layers)]
    return [
        name
        for name, module in built.named_modules()
        if not any(name == path or name.startswith(f"{path}.") for path in inside)
        and sandbox.is_leaf(module)
        and not isinstance(module, missing)
    ]


def _make_layers(_: Any, build: Callable[..., torch.nn.Module], prefix: str) -> tuple[int, int, torch.nn.ModuleList]:
    """vLLM's `make_layers`, with one layer for all."""
    return 0, 1, torch.nn.ModuleList([build(prefix=f"{prefix}.0")])


def _refused(classes: FamilyClasses, name: str, saw: str) -> Refused:
    return Refused(
        RefusalKind.CONSTRUCTION,
        at=classes.location,
        name=f"{name}.__init__",
        saw=saw,
        do="serve this family unsplit: its constructors need what the other role owns",
    )
