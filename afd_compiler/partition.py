"""Fifth pass: a side for each node, and so the cut.

1. The experts are pinned to `ffn`; inputs, outputs and all other submodules to `attn`.
2. Everything between is placed by minimum cut over the bytes that a token's values would put on the wire; of equal
   cuts the one with the least on `ffn` wins, so that what comes before the FFN stays with attention.
3. Two preferences, each dropped where one exchange per layer does not allow it: dense FFNs go with the experts, and
   so does work that depends on the FFN's output and constants alone. Neither costs a byte more.

Configuration values are constants on both sides; they have no side and never cross.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from afd_compiler.classes import LayerClass
from afd_compiler.contract import (
    Contract,
    calls_of,
    check_values,
    contract_of,
    cut_refused,
    same_values,
    unreduced_of,
)  # fmt: skip
from afd_compiler.diagnostics import RefusalKind, Refused
from afd_compiler.region import Region, region_of
from afd_compiler.sides import Cut, Moved, cut_of, sides_of
from afd_compiler.trace import Trace
from afd_compiler.tracer import TORCH_MODULES

BOTH = "both"
"""Owner of a submodule that both roles build."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The cut of a layer: contract, owners of its submodules, and where the FFN side stands in the source."""

    contract: Contract
    region: Region
    owners: tuple[tuple[str, str], ...]
    """(submodule of the layer, role), in the order of construction; ("mlp=Dense", role) where a class of it differs."""
    calls: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    """(FFN submodule, its calls' arguments after the first as (parameter, value of the contract or "" for a constant));
    empty where the region is more than such calls."""
    unreduced: tuple[str, ...]
    """FFN submodules that can leave their sum over ranks to whoever reads it; the FFN role takes the sum."""
    exchanges: tuple[int, ...]
    """Of each variant: 1, or 0 where all of the layer's work is attention's."""
    overlap: bool
    """Whether attention has work that could run while the FFN does its own."""
    asks_class: bool = False
    """Whether attention's forward must be told that the stand-in is of the class that upstream asks for."""

    def owner_of(self, child: str, class_name: str) -> str:
        """Role of a submodule of the layer when it is of some class."""
        owners = dict(self.owners)
        return owners.get(f"{child}={class_name}", owners.get(child, "attention"))


def partition(
    layer: LayerClass, traces: tuple[Trace, ...], forward: ast.FunctionDef, known: frozenset[str]
) -> tuple[Partition, ...]:
    """The ways to cut all variants alike, best first; raise `Refused` where there is none.

    `known` are the global names of forward's module.
    """
    found: list[Partition] = []
    refusals: list[Refused] = []
    for moved in _choices(layer, traces):
        sides = [sides_of(trace, moved) for trace in traces]
        for following in (True, False):
            cuts = [cut_of(side, following, layer.moe_children) for side in sides]
            try:
                cut = _partition(layer, traces, forward, known, moved, cuts)
            except Refused as reason:
                refusals.append(reason)
                continue
            found += [way for way in _forms(cut) if way not in found]
    if not found:
        raise refusals[0]
    return (*found, *(replace(way, owners=tuple(_shared(way, layer))) for way in found))


def _forms(cut: Partition) -> Iterator[Partition]:
    """As upstream's own calls if that can be, with the classes that forward asks for; and as outlined statements."""
    yield cut
    if cut.calls and len(cut.contract.sent) > 1:
        yield replace(cut, asks_class=True)
    if cut.calls and not cut.unreduced:
        yield replace(cut, calls=())


def _partition(
    layer: LayerClass,
    traces: tuple[Trace, ...],
    forward: ast.FunctionDef,
    known: frozenset[str],
    moved: Moved,
    cuts: list[Cut],
) -> Partition:
    if not any(cut.ffn for cut in cuts):
        raise cut_refused(RefusalKind.NO_BOUNDARY, layer, layer.location, "no FFN is called in any variant")
    for trace, cut in zip(traces, cuts, strict=True):
        check_values(trace, cut, layer)
    inputs = same_values(layer, traces, cuts)
    region = _call_alone(traces, cuts) or region_of(
        forward,
        ffn_lines=_lines(traces, [cut.ffn for cut in cuts]),
        attention_lines=_lines(traces, [cut.attention for cut in cuts]),
        active_lines=_lines(traces, [cut.active for cut in cuts]),
        file=_file(traces, cuts),
        known=known,
    )
    calls = calls_of(traces, cuts)
    return Partition(
        contract=contract_of(region, layer, _file(traces, cuts), inputs, max(len(cut.sent) for cut in cuts)),
        region=region,
        owners=tuple(_owners(traces, moved)),
        calls=calls,
        unreduced=unreduced_of(layer, traces, moved, bool(calls)),
        exchanges=tuple(int(bool(cut.ffn)) for cut in cuts),
        overlap=any(cut.overlap for cut in cuts),
    )


def _owners(traces: tuple[Trace, ...], moved: Moved) -> Iterator[tuple[str, str]]:
    children = [child for trace in traces for child in trace.children.values()]
    of_torch = {child.name for child in children if child.class_name.startswith(TORCH_MODULES)}
    for name in dict.fromkeys(child.name.partition(".")[0] for child in children):
        yield name, "ffn" if name in moved.children else BOTH if name in of_torch else "attention"
    kept = (child for child in children if child.name in moved.children and child not in moved)
    yield from dict.fromkeys((f"{child.name}={child.class_name}", "attention") for child in kept)


def _shared(way: Partition, layer: LayerClass) -> Iterator[tuple[str, str]]:
    """The owners, where upstream's constructor needs what is small on both roles: norms, say."""
    for name, role in way.owners:
        small = role == "attention" and "=" not in name and name not in layer.attention_children
        yield name, BOTH if small else role


def _choices(layer: LayerClass, traces: tuple[Trace, ...]) -> Iterator[Moved]:
    """With the experts all dense FFNs; or the experts alone; or not even what stands in their place in some layers."""
    experts = {name.name for name in layer.expert_names}
    others = {name.name for child, group in layer.modules if child in layer.moe_children for name in group} - experts
    ways = [Moved((*layer.moe_children, *layer.dense_children)), Moved(layer.moe_children)]
    ways += [Moved(layer.moe_children, tuple(sorted(others)))] if experts else []
    for way in dict.fromkeys(ways):
        yield replace(way, children=_with_needed(traces, way))


def _with_needed(traces: tuple[Trace, ...], moved: Moved) -> tuple[str, ...]:
    """The submodules, and those that one of them is built from."""
    needed: dict[str, None] = {}
    for trace in traces:
        words = [text for child in trace.children.values() if child in moved for text in child.arguments]
        for name, child in trace.children.items():
            if any(f"self.{child.class_name}." in text for text in words):
                needed[name.partition(".")[0]] = None
    return tuple(dict.fromkeys((*moved.children, *needed)))


def _call_alone(traces: tuple[Trace, ...], cuts: list[Cut]) -> Region | None:
    """The FFN's side where it is the same call of one submodule in every variant, wherever that call stands."""
    calls = [(trace, cut, node) for trace, cut in zip(traces, cuts, strict=True) for node in cut.ffn]
    words = {_plain_arguments(node, cut) for _, cut, node in calls}
    if len(words) != 1 or None in words:
        return None
    first, *others = (trace.children[str(node.target)].names for trace, _, node in calls)
    name = next((name for name in first if all(name in names for names in others)), None)
    if name is None:
        return None
    call = f"self.{name}(hidden_states{words.pop()})"
    lines = {trace.locations[node].line for trace, _, node in calls}
    names = ("hidden_states", *next(cut.inputs for cut in cuts if cut.ffn))
    boundary = tuple((line, call) for line in sorted(lines))
    return Region(frozenset(lines), frozenset(), names, names[:1], boundary, call)


def _plain_arguments(node: fx.Node, cut: Cut) -> str | None:
    """Text of a submodule call's arguments after the experts' input, where they are inputs and plain constants."""
    if node.op != "call_module" or node.args[:1] != cut.sent[:1]:
        return None
    texts = [_plain_text(value, cut) for value in (*node.args[1:], *node.kwargs.values())]
    if not all(texts):
        return None
    names = [*[""] * (len(node.args) - 1), *(f"{name}=" for name in node.kwargs)]
    return "".join(f", {name}{text}" for name, text in zip(names, texts, strict=True))


def _plain_text(value: Any, cut: Cut) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value in cut.sent and value.op == "placeholder" else ""
    return repr(value) if isinstance(value, bool | int | str | None) and repr(value).isprintable() else ""


def _file(traces: tuple[Trace, ...], cuts: list[Cut]) -> str:
    """Upstream's file that holds the FFN's work."""
    nodes = ((trace, node) for trace, cut in zip(traces, cuts, strict=True) for node in cut.ffn)
    return min(trace.locations[node].file for trace, node in nodes)


def _lines(traces: tuple[Trace, ...], groups: list[frozenset[fx.Node]]) -> frozenset[int]:
    pairs = zip(traces, groups, strict=True)
    return frozenset(trace.locations[node].line for trace, nodes in pairs for node in nodes if node.op != "output")
