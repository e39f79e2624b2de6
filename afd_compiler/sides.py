"""The side of each node of one variant, by minimum cut, and the values that cross."""

from dataclasses import dataclass

import networkx
from networkx.algorithms.flow import edmonds_karp
from torch import fx

from afd_compiler.effects import GETITEM, child_of, forward_nodes, is_effect
from afd_compiler.trace import Trace
from afd_compiler.tracer import Child


@dataclass(frozen=True, slots=True)
class Moved:
    """What goes to the FFN role: submodules of the layer, but for those of some classes."""

    children: tuple[str, ...]
    but: tuple[str, ...] = ()

    def __contains__(self, child: Child) -> bool:
        return child.name.partition(".")[0] in self.children and child.class_name not in self.but


@dataclass(frozen=True, slots=True)
class Sides:
    """One variant's live nodes by minimum cut."""

    nodes: tuple[fx.Node, ...]
    pinned: frozenset[fx.Node]
    ffn: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class Cut:
    """One variant's nodes on the FFN side, and what crosses."""

    ffn: frozenset[fx.Node]
    attention: frozenset[fx.Node]
    """Effects on the attention side."""
    active: frozenset[fx.Node]
    """All that depends on the step's tensors."""
    sent: tuple[fx.Node, ...]
    """The experts' input first."""
    returned: tuple[fx.Node, ...]
    overlap: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """Forward's parameters among the values that go with the first."""
        return tuple(str(node.target) for node in self.sent[1:] if node.op == "placeholder")


def sides_of(trace: Trace, moved: Moved) -> Sides:
    nodes = _live_activations(trace)
    pinned = _pins(nodes, trace, moved)
    ffn = _least_ffn_side(nodes, pinned) if "ffn" in pinned.values() else set()
    return Sides(tuple(nodes), frozenset(pinned), frozenset(ffn))


def cut_of(sides: Sides, following: bool, experts: tuple[str, ...]) -> Cut:
    nodes = sides.nodes
    ffn = _with_what_follows(sides) if following else sides.ffn
    sent = [node for node in nodes if node not in ffn and any(user in ffn for user in node.users)]
    calls = [node.args[0] for node in nodes if node in ffn and child_of(node) in experts and node.args]
    sent.sort(key=lambda node: (node not in calls[:1], node.op == "placeholder"))
    returned = [
        node for node in nodes if node in ffn and any(user not in ffn for user in _live_users(node, set(nodes)))
    ]
    attention = frozenset(node for node in nodes if is_effect(node) and node not in ffn)
    return Cut(
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


def _pins(nodes: list[fx.Node], trace: Trace, moved: Moved) -> dict[fx.Node, str]:
    pinned: dict[fx.Node, str] = {}
    for node in nodes:
        name = child_of(node)
        if name is not None:
            child = trace.children.get(name)
            is_moved = child in moved if child else name in moved.children
            pinned[node] = "ffn" if is_moved else "attn"
        elif node.op in ("placeholder", "output"):
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
    # So few values cross that a path for each of them takes half as long as its default.
    _, (_, ffn_side) = networkx.minimum_cut(flow, "attn", "ffn", flow_func=edmonds_karp)
    return {node for node in nodes if node in ffn_side}


def _with_what_follows(sides: Sides) -> frozenset[fx.Node]:
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
