"""What crosses the boundary of a layer, the same in all its variants; refuses what no contract can hold."""

import re
from dataclasses import dataclass

from torch import fx

from afd_compiler.classes import LayerClass
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.region import Region
from afd_compiler.sides import Cut, Moved
from afd_compiler.trace import Trace
from afd_compiler.tracer import REDUCES, SKIPS, UNREDUCED

TOKEN_TENSOR = ("tokens", "hidden")
"""Shape of a decoder layer's activations."""
TOKEN_INPUT = ("tokens", "...")
"""Shape of an input of the model that goes to the FFN with them; each step says what it is."""
MOST_VALUES = 5
"""Sent by a layer; the step's header has no room for more."""


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


def check_values(trace: Trace, cut: Cut, layer: LayerClass) -> None:
    if not cut.ffn:
        return
    first = next(node for node in trace.graph.nodes if node in cut.ffn)
    at = trace.locations[first]
    for direction, values, most in (("to the FFN", cut.sent, MOST_VALUES), ("back", cut.returned, 1)):
        if not 1 <= len(values) <= most:
            shown = ", ".join(str(trace.locations[node]) for node in values) or "none"
            saw = f"{len(values)} values cross {direction} (made at {shown}) in the variant {trace.name}"
            raise cut_refused(RefusalKind.CONTRACT, layer, at, saw)
    order = {node: position for position, node in enumerate(trace.graph.nodes)}
    # FFNs may write into their input; into what goes with it they do not.
    late = [user for user in cut.sent[0].users if user not in cut.ffn and order[user] > order[first]]
    if late:
        saw = f"the value that is sent is used again at {trace.locations[late[0]]}, after the FFN may have changed it"
        raise cut_refused(RefusalKind.CONTRACT, layer, at, saw)


def same_values(layer: LayerClass, traces: tuple[Trace, ...], cuts: list[Cut]) -> tuple[str, ...]:
    """Inputs that go with the hidden states; the layers of a step send the same, so all variants must."""
    ways = {(len(cut.sent), cut.inputs): trace for trace, cut in zip(traces, cuts, strict=True) if cut.ffn}
    if len(ways) > 1:
        shown = "; ".join(f"{count} ({', '.join(names)}) in {trace.name}" for (count, names), trace in ways.items())
        raise cut_refused(RefusalKind.CONTRACT, layer, layer.location, f"variants send different values: {shown}")
    ((_, inputs),) = ways
    return inputs


def contract_of(region: Region, layer: LayerClass, file: str, inputs: tuple[str, ...], count: int) -> Contract:
    main = [name for name in region.reads if name not in inputs]
    if len(region.reads) != count or len(main) + len(inputs) != count or not region.writes:
        saw = f"the FFN's statements read {list(region.reads)} and write {list(region.writes)}"
        raise cut_refused(RefusalKind.CONTRACT, layer, Location(file, min(region.kept)), saw)
    sent = [CutValue(name, TOKEN_TENSOR, "model") for name in main]
    sent += [CutValue(name, TOKEN_INPUT, "own") for name in inputs]
    return Contract(tuple(sent), (CutValue(region.writes[-1], TOKEN_TENSOR, "model"),))


def calls_of(traces: tuple[Trace, ...], cuts: list[Cut]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """What each FFN submodule is called with besides the experts' input; nothing where a call is more than that."""
    found: dict[str, dict[str, str]] = {}
    for trace, cut in zip(traces, cuts, strict=True):
        calls = [node for node in trace.graph.nodes if node in cut.ffn and node.op == "call_module"]
        for node in calls:
            passed = {node: str(node.target) for node in cut.sent[1:] if node.op == "placeholder"}
            given = [*((passed.get(value, ""), value) for value in node.args[1:]), *node.kwargs.items()]
            plain = all(name and (value in passed or not isinstance(value, fx.Node)) for name, value in given)
            if len(calls) != 1 or node.args[:1] != cut.sent[:1] or not plain:
                return ()
            held = found.setdefault(str(node.target), {})
            for name, value in given:
                if held.setdefault(name, passed.get(value, "")) != passed.get(value, ""):
                    return ()
    return tuple((name, tuple(parameters.items())) for name, parameters in found.items())


_SET_LATER = re.compile(rf"\.({REDUCES}|{SKIPS})=")


def unreduced_of(layer: LayerClass, traces: tuple[Trace, ...], moved: Moved, as_calls: bool) -> tuple[str, ...]:
    """FFN submodules whose sum over ranks upstream can leave to the next reader, over attention's ranks after a cut."""
    found: dict[str, None] = {}
    for trace in traces:
        for name, child in trace.children.items():
            if child not in moved:
                continue
            if later := [text for text in child.arguments if _SET_LATER.search(text)]:
                saw = f"`{later[0]}` is set after submodule {name} is built: its output can be a partial sum"
                raise cut_refused(RefusalKind.UNREDUCED, layer, child.location, saw)
            if UNREDUCED not in child.arguments:
                continue
            if not as_calls:
                saw = f"submodule {name} is built with `{UNREDUCED}`, and more than its call is the FFN's"
                raise cut_refused(RefusalKind.UNREDUCED, layer, child.location, saw)
            found[name] = None
    return tuple(found)


_TO_DO = {
    RefusalKind.CONTRACT: (
        "serve this family unsplit: layers send what they call their FFN with, all alike, and get one tensor back"
    ),
    RefusalKind.UNREDUCED: (
        "serve this family unsplit: the FFN role takes a sum only where a constructor's argument leaves it out"
    ),
    RefusalKind.NO_BOUNDARY: "serve this family unsplit: its layers make no exchange",
}


def cut_refused(kind: RefusalKind, layer: LayerClass, at: Location, saw: str) -> Refused:
    return Refused(kind, at=at, name=f"{layer.name}.forward", saw=saw, do=_TO_DO[kind])
