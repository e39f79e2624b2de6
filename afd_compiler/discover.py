"""Finds the architectures of a release that hold a mixture of experts and that no spec names yet.

A model that is built around another registered one counts where its source names one that holds experts; where only its
configuration does, it has to be asked for by name.

One spec for each upstream module: architectures that share a module share its layers. A module that a spec has
already keeps that spec's family; what is found there is to be added to it by hand, for a spec is never overwritten.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from afd_compiler.classes import REGISTRY, file_of, is_in, registry, wraps_registered
from afd_compiler.constructs import Constructs, is_model_class
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.spec import Spec
from afd_compiler.symbols import Symbol, Symbols


@dataclass(frozen=True, slots=True)
class Found:
    """A module with architectures that no spec names, and the spec that covers it."""

    spec: Spec
    missing: tuple[str, ...]
    """The architectures that no spec names; all of the spec's own where the module has had none."""
    new: bool


def discover(symbols: Symbols, specs: Sequence[Spec], architecture: str | None = None) -> tuple[Found, ...]:
    """What no spec covers: all of it, or one architecture, which raises `Refused` where it cannot be covered."""
    registered = registry(symbols)
    if architecture is not None and architecture not in registered:
        raise _unknown(architecture, registered, symbols)
    covered = {name: spec for spec in specs for name in spec.architectures}
    if architecture in covered:
        return (Found(covered[architecture], (), new=False),)
    built = Constructs(symbols)
    groups: dict[str, list[str]] = {}
    for name in [architecture] if architecture else [name for name in registered if name not in covered]:
        symbol = symbols.resolve(*registered[name])
        if is_model_class(symbol) and _splits(symbol, built, registered, named=architecture is not None):
            groups.setdefault(_module(symbol, registered[name][0]), []).append(name)
        elif architecture:
            raise _without_experts(architecture, symbol, built, symbols)
    return tuple(_found(module, names, specs) for module, names in sorted(groups.items()))


def _splits(symbol: Symbol, built: Constructs, registered: Mapping[str, tuple[str, str]], *, named: bool) -> bool:
    """Whether a class holds a mixture of experts, or is built around a registered model that does, or can."""
    if built.holds_experts(symbol):
        return True
    wrappers = [cls for cls in built.reachable([symbol]) if wraps_registered(built, cls)]
    inner = (
        built.symbols.resolve(*registered[name]) for cls in wrappers for name in _texts(built, cls) & registered.keys()
    )
    return bool(wrappers) and (named or any(map(built.holds_experts, filter(is_model_class, inner))))


def _texts(built: Constructs, cls: Symbol) -> set[str]:
    nodes = (node for owner in built.lineage(cls) for node in ast.walk(built.node(owner)))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _module(symbol: Symbol, registered: str) -> str:
    """The registered module where it is the class's own, or a package with one for each platform."""
    return registered if is_in(symbol, registered) else symbol.module


def _found(module: str, names: list[str], specs: Sequence[Spec]) -> Found:
    if known := next((spec for spec in specs if spec.module == module), None):
        whole = known.model_copy(update={"architectures": (*known.architectures, *names)})
        return Found(whole, tuple(names), new=False)
    family = _family(module, {spec.family for spec in specs})
    return Found(Spec(family=family, module=module, architectures=tuple(names)), tuple(names), new=True)


def _family(module: str, taken: Iterable[str]) -> str:
    """The last part of the module's name, or as many as make it another family than those there are."""
    parts = module.lower().split(".")
    names = ("_".join(parts[-count:]) for count in range(1, len(parts) + 1))
    return next(name for name in names if name not in taken)


def _unknown(architecture: str, registered: Iterable[str], symbols: Symbols) -> Refused:
    near = ", ".join(get_close_matches(architecture, registered, n=3))
    return Refused(
        RefusalKind.ARCHITECTURE_MISSING,
        at=Location(file_of(REGISTRY), 1),
        name=architecture,
        saw=f"the model registry of vLLM {symbols.tree.release} has no such architecture",
        do=f"name one of it: {near}" if near else "name one of it, as a model's config.json does",
    )


def _without_experts(architecture: str, symbol: Symbol, built: Constructs, symbols: Symbols) -> Refused:
    line, saw, do = 1, f"{symbol} is not in the source for {symbols.platform}", "choose another platform"
    if is_model_class(symbol):
        line, saw = built.node(symbol).lineno, f"{symbol.name} builds no mixture of experts"
        do = "serve it unsplit: there is nothing for an FFN role to do"
    return Refused(RefusalKind.NO_EXPERTS, at=Location(file_of(symbol.module), line), name=architecture, saw=saw, do=do)
