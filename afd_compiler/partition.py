"""Fifth pass: a side for each node, and so the cut.

1. Inputs, outputs and attention are pinned to `attn`, the FFN to `ffn`.
2. Everything between is placed by minimum cut over the bytes that a token's values would put on the wire; of equal
   cuts the one with the least on `ffn` wins, so that what comes before the FFN stays with attention.
3. Work that depends on the FFN's output and constants alone moves to `ffn`: it costs no byte more.

Configuration values are constants on both sides; they have no side and never cross.
"""

import ast
from dataclasses import dataclass

import networkx
from torch import fx

from afd_compiler.classes import LayerClasses
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.effects import GETITEM, child_of, forward_nodes, is_effect
from afd_compiler.region import Region, region_of
from afd_compiler.trace import Trace

UNREDUCED = "reduce_results=False"
"""The constructor argument by which vLLM's FFNs leave out the all-reduce over their ranks."""
TOKEN_TENSOR = ("tokens", "hidden")
"""Shape of a decoder layer's activations, and the only one that crosses the boundary so far."""


@dataclass(frozen=True, slots=True)
class CutValue:
    """A value that crosses the boundary."""

    name: str
    shape: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Contract:
    """What crosses the boundary of a layer, in wire order, the same for every variant."""

    sent: tuple[CutValue, ...]
    returned: tuple[CutValue, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """The cut of a layer: contract, owners of its submodules, and where the FFN side stands in the source."""

    contract: Contract
    region: Region
    owners: tuple[tuple[str, str], ...]
    """(submodule of the layer, role), in the order of construction."""
    calls: tuple[tuple[str, tuple[str, ...]], ...]
    """(FFN submodule, keywords of constants in its calls)."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """One variant's nodes on the FFN side, and what crosses."""

    ffn: frozenset[fx.Node]
    attention: frozenset[fx.Node]
    """Effects on the attention side."""
    sent: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]


def partition(
    classes: LayerClasses, traces: tuple[Trace, ...], forward: ast.FunctionDef, known: frozenset[str]
) -> Partition:
    """Cut all variants alike; raise `Refused` where they cannot be. `known` are global names of the module."""
    cuts = [_cut(trace, classes) for trace in traces]
    for trace, cut in zip(traces, cuts, strict=True):
        _check_single_tensors(trace, cut, classes)
    region = region_of(
        forward,
        ffn_lines=_lines(traces, [cut.ffn for cut in cuts]),
        attention_lines=_lines(traces, [cut.attention for cut in cuts]),
        file=classes.file,
        known=known,
    )
    owners = _owners(classes, traces, cuts)
    _check_reduced(classes, traces, dict(owners))
    return Partition(_contract(region, classes), region, owners, _calls(classes, traces, cuts))


def _lines(traces: tuple[Trace, ...], groups: list[frozenset[fx.Node]]) -> frozenset[int]:
    pairs = zip(traces, groups, strict=True)
    return frozenset(trace.locations[node].line for trace, nodes in pairs for node in nodes if node.op != "output")


def _cut(trace: Trace, classes: LayerClasses) -> _Cut:
    nodes = _live_activations(trace)
    pinned = _pins(nodes, classes)
    if "ffn" not in pinned.values():
        raise _refused(
            RefusalKind.NO_BOUNDARY, classes, classes.location, f"no FFN is called in the variant {trace.name}"
        )
    ffn = _least_ffn_side(nodes, pinned)
    _take_what_follows(nodes, pinned, ffn)
    sent = [node for node in nodes if node not in ffn and any(user in ffn for user in node.users)]
    returned = [
        node for node in nodes if node in ffn and any(user not in ffn for user in _live_users(node, set(nodes)))
    ]
    attention = frozenset(node for node in nodes if is_effect(node) and node not in ffn)
    return _Cut(frozenset(ffn), attention, tuple(sent), tuple(returned))


def _live_activations(trace: Trace) -> list[fx.Node]:
    """Forward's nodes that depend on the step's tensors, and that an effect or the output needs; in order."""
    needed: set[fx.Node] = set()
    pending = [node for node in forward_nodes(trace.graph) if is_effect(node) or node.op == "output"]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    active: set[fx.Node] = set()
    for node in trace.graph.nodes:
        is_input = node.op == "placeholder" and node.target in trace.inputs
        if (
            is_input
            or node.op in ("call_module", "output")
            or any(argument in active for argument in node.all_input_nodes)
        ):
            active.add(node)
    return [node for node in trace.graph.nodes if node in needed and node in active]


def _pins(nodes: list[fx.Node], classes: LayerClasses) -> dict[fx.Node, str]:
    pinned: dict[fx.Node, str] = {}
    for node in nodes:
        child = child_of(node)
        if node.op in ("placeholder", "output") or child in classes.attention_children:
            pinned[node] = "attn"
        elif child in classes.ffn_children:
            pinned[node] = "ffn"
    return pinned


def _least_ffn_side(nodes: list[fx.Node], pinned: dict[fx.Node, str]) -> set[fx.Node]:
    """Minimum cut. Each value has one edge per direction, whatever the number of its users: it is sent once."""
    flow = networkx.DiGraph()
    inside = set(nodes)
    for node, side in pinned.items():
        flow.add_edge(*((node, "ffn") if side == "ffn" else ("attn", node)))
    for node in nodes:
        users = _live_users(node, inside)
        together = any(user.target is GETITEM for user in users) and node.op == "call_module"
        flow.add_edge(node, (node, "out"), **({} if together else {"capacity": 1}))
        flow.add_edge((node, "in"), node, **({} if together else {"capacity": 1}))
        for user in users:
            flow.add_edge((node, "out"), user)
            flow.add_edge(user, (node, "in"))
    # Of equal cuts networkx takes the one nearest the sink, which is the least ffn side.
    _, (_, ffn_side) = networkx.minimum_cut(flow, "attn", "ffn")
    return {node for node in nodes if node in ffn_side}


def _take_what_follows(nodes: list[fx.Node], pinned: dict[fx.Node, str], ffn: set[fx.Node]) -> None:
    inside = set(nodes)
    for node in nodes:
        arguments = [argument for argument in node.all_input_nodes if argument in inside]
        alone = all(argument in ffn and len(_live_users(argument, inside)) == 1 for argument in arguments)
        if node not in pinned and arguments and alone:
            ffn.add(node)


def _live_users(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    return [user for user in node.users if user in inside]


def _check_single_tensors(trace: Trace, cut: _Cut, classes: LayerClasses) -> None:
    first = next(node for node in trace.graph.nodes if node in cut.ffn)
    at = trace.locations[first]
    for direction, values in (("to the FFN", cut.sent), ("back", cut.returned)):
        if len(values) != 1:
            shown = ", ".join(str(trace.locations[node]) for node in values) or "none"
            saw = f"{len(values)} values cross {direction} (made at {shown}) in the variant {trace.name}"
            raise _refused(RefusalKind.CONTRACT, classes, at, saw)
    order = {node: position for position, node in enumerate(trace.graph.nodes)}
    late = [user for user in cut.sent[0].users if user not in cut.ffn and order[user] > order[first]]
    if late:
        saw = f"the value that is sent is used again at {trace.locations[late[0]]}, after the FFN may have changed it"
        raise _refused(RefusalKind.CONTRACT, classes, at, saw)


def _contract(region: Region, classes: LayerClasses) -> Contract:
    if len(region.reads) != 1 or not region.writes:
        line = min(region.kept)
        saw = f"the FFN's statements read {list(region.reads)} and write {list(region.writes)}"
        raise _refused(RefusalKind.CONTRACT, classes, Location(classes.file, line), saw)
    sent, returned = region.reads[0], region.writes[-1]
    dtype = "model"
    return Contract((CutValue(sent, TOKEN_TENSOR, dtype),), (CutValue(returned, TOKEN_TENSOR, dtype),))


def _owners(classes: LayerClasses, traces: tuple[Trace, ...], cuts: list[_Cut]) -> tuple[tuple[str, str], ...]:
    owners: dict[str, str] = {}
    for trace, cut in zip(traces, cuts, strict=True):
        served = {child_of(node) for node in cut.ffn}
        kept = {child_of(node) for node in cut.attention}
        for name, child in trace.children.items():
            role = "ffn" if name in served else "attention"
            if owners.setdefault(name, role) != role or (name in served and name in kept):
                saw = f"submodule {name} is used by attention and by the FFN"
                raise _refused(RefusalKind.OWNERLESS, classes, child.location, saw)
    return tuple(owners.items())


def _calls(
    classes: LayerClasses, traces: tuple[Trace, ...], cuts: list[_Cut]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Keywords of each FFN submodule's calls, besides the tensor that is sent."""
    found: dict[str, dict[str, None]] = {}
    for trace, cut in zip(traces, cuts, strict=True):
        for node in trace.graph.nodes:
            if node not in cut.ffn or node.op != "call_module" or node.target not in classes.ffn_children:
                continue
            if tuple(node.args) != cut.sent or any(isinstance(value, fx.Node) for value in node.kwargs.values()):
                saw = f"the call of {node.target} takes more than the value that is sent"
                raise _refused(RefusalKind.CONTRACT, classes, trace.locations[node], saw)
            found.setdefault(str(node.target), {}).update(dict.fromkeys(node.kwargs))
    return tuple((name, tuple(keywords)) for name, keywords in found.items())


def _check_reduced(classes: LayerClasses, traces: tuple[Trace, ...], owners: dict[str, str]) -> None:
    """An FFN that leaves its sum to whoever reads it next would have the sum taken over attention's ranks instead."""
    for trace in traces:
        for name, child in trace.children.items():
            if owners[name] == "ffn" and UNREDUCED in child.arguments:
                saw = f"submodule {name} is built with `{UNREDUCED}`: its output is a partial sum of each rank"
                raise _refused(RefusalKind.UNREDUCED, classes, child.location, saw)


_TO_DO = {
    RefusalKind.CONTRACT: "serve this family unsplit: the contract holds one [tokens, hidden] tensor each way",
    RefusalKind.UNREDUCED: "serve this family unsplit: the FFN role does not reduce in place of the next norm yet",
    RefusalKind.OWNERLESS: "serve this family unsplit: a submodule's weights have one owner",
    RefusalKind.NO_BOUNDARY: "serve this family unsplit: every layer makes one exchange",
}


def _refused(kind: RefusalKind, classes: LayerClasses, at: Location, saw: str) -> Refused:
    return Refused(kind, at=at, name=f"{classes.layer}.forward", saw=saw, do=_TO_DO[kind])
