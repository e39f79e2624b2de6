"""Fifth pass: a side for each node, and so the cut.

1. The experts are pinned to `ffn`; inputs, outputs and all other submodules to `attn`.
2. Everything between is placed by minimum cut over the bytes that a token's values would put on the wire; of equal
   cuts the one with the least on `ffn` wins, so that what comes before the FFN stays with attention.
3. Two preferences, each dropped where one exchange per layer does not allow it: dense FFNs go with the experts, and
   so does work that depends on the FFN's output and constants alone. Neither costs a byte more.

Configuration values are constants on both sides; they have no side and never cross.
"""

import ast
from dataclasses import dataclass, replace

import networkx
from torch import fx

from afd_compiler.classes import LayerClass
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.effects import GETITEM, child_of, forward_nodes, is_effect
from afd_compiler.region import Region, region_of
from afd_compiler.trace import Trace

REDUCES = "reduce_results="
"""The constructor argument by which vLLM's FFNs can leave out the all-reduce over their ranks."""
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
    """(FFN submodule, keywords of constants in its calls); empty where the region is more than such calls."""
    exchanges: tuple[int, ...]
    """Of each variant: 1, or 0 where all of the layer's work is attention's."""
    overlap: bool
    """Whether attention has work that could run while the FFN does its own."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """One variant's live nodes by minimum cut."""

    nodes: tuple[fx.Node, ...]
    pinned: frozenset[fx.Node]
    ffn: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One variant's nodes on the FFN side, and what crosses."""

    ffn: frozenset[fx.Node]
    attention: frozenset[fx.Node]
    """Effects on the attention side."""
    active: frozenset[fx.Node]
    """All that depends on the step's tensors."""
    sent: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]
    overlap: bool


def partition(
    layer: LayerClass, traces: tuple[Trace, ...], forward: ast.FunctionDef, known: frozenset[str]
) -> tuple[Partition, ...]:
    """The ways to cut all variants alike, best first; raise `Refused` where there is none.

    `known` are the global names of forward's module.
    """
    found: list[Partition] = []
    refusals: list[Refused] = []
    for moved in dict.fromkeys(((*layer.moe_children, *layer.dense_children), layer.moe_children)):
        sides = [_sides(trace, moved) for trace in traces]
        for following in (True, False):
            try:
                cut = _partition(layer, traces, forward, known, moved, [_cut(side, following) for side in sides])
            except Refused as reason:
                refusals.append(reason)
                continue
            ways = (cut, replace(cut, calls=())) if cut.calls else (cut,)
            found += [way for way in ways if way not in found]
    if not found:
        raise refusals[0]
    return tuple(found)


def _partition(
    layer: LayerClass,
    traces: tuple[Trace, ...],
    forward: ast.FunctionDef,
    known: frozenset[str],
    moved: tuple[str, ...],
    cuts: list[_Cut],
) -> Partition:
    if not any(cut.ffn for cut in cuts):
        raise _refused(RefusalKind.NO_BOUNDARY, layer, layer.location, "no FFN is called in any variant")
    for trace, cut in zip(traces, cuts, strict=True):
        _check_single_tensors(trace, cut, layer)
    region = _call_alone(traces, cuts) or region_of(
        forward,
        ffn_lines=_lines(traces, [cut.ffn for cut in cuts]),
        attention_lines=_lines(traces, [cut.attention for cut in cuts]),
        active_lines=_lines(traces, [cut.active for cut in cuts]),
        file=_file(traces, cuts),
        known=known,
    )
    owners = tuple((name, "ffn" if name in moved else "attention") for name in _children(traces))
    _check_reduced(layer, traces, dict(owners))
    return Partition(
        contract=_contract(region, layer, _file(traces, cuts)),
        region=region,
        owners=owners,
        calls=_calls(traces, cuts),
        exchanges=tuple(int(bool(cut.ffn)) for cut in cuts),
        overlap=any(cut.overlap for cut in cuts),
    )


def _children(traces: tuple[Trace, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.partition(".")[0] for trace in traces for name in trace.children))


def _call_alone(traces: tuple[Trace, ...], cuts: list[_Cut]) -> Region | None:
    """The FFN's side where it is the same call of one submodule in every variant, wherever that call stands."""
    found: dict[str, set[int]] = {}
    for trace, cut in zip(traces, cuts, strict=True):
        for node in cut.ffn:
            words = "".join(f", {name}={value!r}" for name, value in node.kwargs.items())
            plain = node.op == "call_module" and tuple(node.args) == cut.sent and words.isprintable()
            if not plain or not all(isinstance(value, bool | int | str | None) for value in node.kwargs.values()):
                return None
            found.setdefault(f"self.{node.target}(hidden_states{words})", set()).add(trace.locations[node].line)
    if len(found) != 1:
        return None
    ((call, lines),) = found.items()
    names = ("hidden_states",)
    return Region(frozenset(lines), frozenset(), names, names, tuple((line, call) for line in sorted(lines)), call)


def _file(traces: tuple[Trace, ...], cuts: list[_Cut]) -> str:
    """Upstream's file that holds the FFN's work."""
    nodes = ((trace, node) for trace, cut in zip(traces, cuts, strict=True) for node in cut.ffn)
    return min(trace.locations[node].file for trace, node in nodes)


def _lines(traces: tuple[Trace, ...], groups: list[frozenset[fx.Node]]) -> frozenset[int]:
    pairs = zip(traces, groups, strict=True)
    return frozenset(trace.locations[node].line for trace, nodes in pairs for node in nodes if node.op != "output")


def _sides(trace: Trace, moved: tuple[str, ...]) -> _Sides:
    nodes = _live_activations(trace)
    pinned = _pins(nodes, moved)
    ffn = _least_ffn_side(nodes, pinned) if "ffn" in pinned.values() else set()
    return _Sides(tuple(nodes), frozenset(pinned), frozenset(ffn))


def _cut(sides: _Sides, following: bool) -> _Cut:
    nodes = sides.nodes
    ffn = _with_what_follows(sides) if following else sides.ffn
    sent = [node for node in nodes if node not in ffn and any(user in ffn for user in node.users)]
    returned = [
        node for node in nodes if node in ffn and any(user not in ffn for user in _live_users(node, set(nodes)))
    ]
    attention = frozenset(node for node in nodes if is_effect(node) and node not in ffn)
    return _Cut(
        ffn, attention, frozenset(nodes), tuple(sent), tuple(returned), _overlap(nodes, attention, sent, returned)
    )


def _overlap(
    nodes: tuple[fx.Node, ...], attention: frozenset[fx.Node], sent: list[fx.Node], returned: list[fx.Node]
) -> bool:
    """Whether some of attention's effects neither lead to what is sent nor need what comes back."""
    before = set(sent)
    for node in reversed(nodes):
        if any(user in before for user in node.users):
            before.add(node)
    after = set(returned)
    for node in nodes:
        if any(argument in after for argument in node.all_input_nodes):
            after.add(node)
    return bool(sent) and any(node not in before and node not in after for node in attention)


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


def _pins(nodes: list[fx.Node], moved: tuple[str, ...]) -> dict[fx.Node, str]:
    pinned: dict[fx.Node, str] = {}
    for node in nodes:
        child = child_of(node)
        if child is not None and child.partition(".")[0] in moved:
            pinned[node] = "ffn"
        elif node.op in ("placeholder", "output") or child is not None:
            pinned[node] = "attn"
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


def _with_what_follows(sides: _Sides) -> frozenset[fx.Node]:
    inside = set(sides.nodes)
    ffn = set(sides.ffn)
    for node in sides.nodes:
        arguments = [argument for argument in node.all_input_nodes if argument in inside]
        alone = all(argument in ffn and len(_live_users(argument, inside)) == 1 for argument in arguments)
        if node not in sides.pinned and arguments and alone:
            ffn.add(node)
    return frozenset(ffn)


def _live_users(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    return [user for user in node.users if user in inside]


def _check_single_tensors(trace: Trace, cut: _Cut, layer: LayerClass) -> None:
    if not cut.ffn:
        return
    first = next(node for node in trace.graph.nodes if node in cut.ffn)
    at = trace.locations[first]
    for direction, values in (("to the FFN", cut.sent), ("back", cut.returned)):
        if len(values) != 1:
            shown = ", ".join(str(trace.locations[node]) for node in values) or "none"
            saw = f"{len(values)} values cross {direction} (made at {shown}) in the variant {trace.name}"
            raise _refused(RefusalKind.CONTRACT, layer, at, saw)
    order = {node: position for position, node in enumerate(trace.graph.nodes)}
    late = [user for user in cut.sent[0].users if user not in cut.ffn and order[user] > order[first]]
    if late:
        saw = f"the value that is sent is used again at {trace.locations[late[0]]}, after the FFN may have changed it"
        raise _refused(RefusalKind.CONTRACT, layer, at, saw)


def _contract(region: Region, layer: LayerClass, file: str) -> Contract:
    if len(region.reads) != 1 or not region.writes:
        saw = f"the FFN's statements read {list(region.reads)} and write {list(region.writes)}"
        raise _refused(RefusalKind.CONTRACT, layer, Location(file, min(region.kept)), saw)
    sent, returned = region.reads[0], region.writes[-1]
    dtype = "model"
    return Contract((CutValue(sent, TOKEN_TENSOR, dtype),), (CutValue(returned, TOKEN_TENSOR, dtype),))


def _calls(traces: tuple[Trace, ...], cuts: list[_Cut]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Keywords of each FFN submodule's calls besides the tensor that is sent; nothing where one is more than that."""
    found: dict[str, dict[str, None]] = {}
    for trace, cut in zip(traces, cuts, strict=True):
        calls = [node for node in trace.graph.nodes if node in cut.ffn and node.op == "call_module"]
        for node in calls:
            plain = tuple(node.args) == cut.sent and not any(
                isinstance(value, fx.Node) for value in node.kwargs.values()
            )
            if len(calls) != 1 or not plain:
                return ()
            found.setdefault(str(node.target), {}).update(dict.fromkeys(node.kwargs))
    return tuple((name, tuple(keywords)) for name, keywords in found.items())


def _check_reduced(layer: LayerClass, traces: tuple[Trace, ...], owners: dict[str, str]) -> None:
    """An FFN that leaves its sum to whoever reads it next would have the sum taken over attention's ranks instead."""
    for trace in traces:
        for name, child in trace.children.items():
            left_out = [text for text in child.arguments if text.startswith(REDUCES) and text != f"{REDUCES}True"]
            if owners[name.partition(".")[0]] == "ffn" and left_out:
                saw = f"submodule {name} is built with `{left_out[0]}`: its output can be a partial sum of each rank"
                raise _refused(RefusalKind.UNREDUCED, layer, child.location, saw)


_TO_DO = {
    RefusalKind.CONTRACT: "serve this family unsplit: the contract holds one [tokens, hidden] tensor each way",
    RefusalKind.UNREDUCED: "serve this family unsplit: the FFN role does not reduce in place of the next norm yet",
    RefusalKind.NO_BOUNDARY: "serve this family unsplit: its layers make no exchange",
}


def _refused(kind: RefusalKind, layer: LayerClass, at: Location, saw: str) -> Refused:
    return Refused(kind, at=at, name=f"{layer.name}.forward", saw=saw, do=_TO_DO[kind])
