"""Seventh pass: the proof. Shares nothing with `emit` but the tracer.

For every variant of upstream's layer:

1. translation: the emitted attention layer and FFN layer are traced under the same answers and put together, the
   connector nodes as identity; effects, results and their order must be upstream's (`canonical`);
2. weight cover: each submodule that upstream builds is built by its owner, with the same class and arguments, and by
   nobody else;
3. capture safety: no node of the two halves reads a tensor on the host, and the emitted code does nothing that a
   replayed graph would not (`capture`).

Then the causal LM classes must derive from upstream's, and be buildable wherever those are (`construction`). Any
difference is a `Refused` that names both places.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from torch import fx

from afd_compiler import names
from afd_compiler.canonical import Canonical, Effect, canonical_form, composed_form, sends, summed
from afd_compiler.capture import HOST_READS, hazards_of
from afd_compiler.classes import FamilyClasses, LayerClass
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.effects import forward_nodes
from afd_compiler.partition import BOTH, Partition
from afd_compiler.sandbox import Sandbox
from afd_compiler.source import sha256_of
from afd_compiler.trace import Trace, UpstreamRaised, trace_one

RUNTIME_MODULE = "afd_runtime.split"
EMITTED_MODULE, EMITTED_FILE = "emitted", "<emitted>"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was proved, and for how many variants."""

    name: str
    variants: int
    detail: str


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved of one layer of an emitted module."""

    variants: tuple[str, ...]
    checks: tuple[Check, ...]
    built: tuple[str, ...]
    """What upstream's layer builds its submodules from: "attn: Attention(size=config.size)", one line per argument."""
    behaviour: str
    """Hash of what upstream's layer does in all its variants; equal hashes mean equal layers, across releases too."""


def load_emitted(sandbox: Sandbox, text: str) -> ModuleType:
    """Execute an emitted module, and the part of the runtime that it is built from."""
    found = find_spec(RUNTIME_MODULE.partition(".")[0])
    assert found is not None  # same distribution
    assert found.origin is not None
    split = Path(found.origin).with_name(RUNTIME_MODULE.rpartition(".")[2] + ".py")
    sandbox.execute(RUNTIME_MODULE, "afd_runtime/split.py", split.read_text(encoding="utf-8"))
    return sandbox.execute(EMITTED_MODULE, EMITTED_FILE, text)


def verify(
    layer: LayerClass, cut: Partition, traces: tuple[Trace, ...], sandbox: Sandbox, emitted: ModuleType
) -> Proof:
    """Prove one layer of the emitted module against all its traces, or raise `Refused` with a counterexample."""
    for upstream in traces:
        attention = _half(sandbox, emitted, "attention", layer, upstream)
        ffn = _half(sandbox, emitted, "ffn", layer, upstream, forward=sends(attention))
        _check_translation(layer, cut, upstream, attention, ffn)
        _check_cover(layer, cut, upstream, attention, ffn)
        _check_capture(layer, (attention, ffn))
    count = len(traces)
    return Proof(
        variants=tuple(trace.name for trace in traces),
        checks=(
            Check("translation", count, "upstream's graph equals the two halves joined at the connector nodes"),
            Check(
                "weight-cover", count, "every submodule is built by its owners, and only by them, as upstream builds it"
            ),
            Check("capture-safety", count, "no host read of a tensor, at most one exchange per layer"),
        ),
        built=tuple(dict.fromkeys(line for trace in traces for line in _built(trace))),
        behaviour=sha256_of(repr([_behaviour(trace) for trace in traces])),
    )


def check_module(classes: FamilyClasses, sandbox: Sandbox, emitted: ModuleType, text: str) -> None:
    """Raise `Refused` where the emitted module as a whole does what it must not."""
    for symbol in dict.fromkeys(symbol for _, symbol in classes.architectures):
        for role in names.ROLES:
            ours = getattr(emitted, names.role_class(role, symbol.name))
            if not issubclass(ours, sandbox.cls(symbol)):
                raise AssertionError(f"the emitted {role} class of {symbol.name} does not derive from upstream's")
    for hazard in hazards_of(text, EMITTED_FILE, frozenset({"forward"})):
        name = (classes.layers or classes.outer)[0].name
        raise _not_capture_safe(name, classes.location, f"{hazard.saw} ({hazard.at})")


def _built(trace: Trace) -> Iterator[str]:
    for child in trace.children.values():
        yield from (f"{child.name}: {child.class_name}({argument})" for argument in child.arguments)


def _behaviour(trace: Trace) -> tuple[object, ...]:
    children = [(child.name, child.class_name, child.arguments) for child in trace.children.values()]
    return (trace.name, trace.constructions, trace.inputs, children, str(canonical_form(trace)))


def _half(
    sandbox: Sandbox, emitted: ModuleType, role: str, layer: LayerClass, upstream: Trace, *, forward: bool = True
) -> Trace:
    """One role's layer under the answers of a variant; without `forward` for the FFN of a layer without exchanges."""
    entered = frozenset({EMITTED_MODULE, RUNTIME_MODULE})
    name = names.role_class(role, layer.name)
    try:
        _, half = trace_one(
            sandbox,
            getattr(emitted, name),
            layer,
            upstream.answers,
            forks=False,
            entered=entered,
            received=role == "ffn",
            forward=forward,
        )
    except Refused as reason:
        raise _not_equal(layer, upstream, layer.location, f"{name} cannot be followed: {reason.saw}") from reason
    except UpstreamRaised as raised:
        raise _not_equal(layer, upstream, layer.location, f"{name} raises {raised}") from raised
    return half


def _check_translation(layer: LayerClass, cut: Partition, upstream: Trace, attention: Trace, ffn: Trace) -> None:
    native, split = canonical_form(upstream), composed_form(attention, ffn)
    # Both roles know a layer that exchanges by its holding an FFN, so then it must exchange.
    exchanges = int(
        any(cut.owner_of(name.partition(".")[0], c.class_name) == "ffn" for name, c in upstream.children.items())
    )
    if split.hops != exchanges:
        saw = f"the split makes {split.hops} exchanges instead of {exchanges}"
        raise _not_equal(layer, upstream, layer.location, saw)
    for theirs, ours in zip(native.effects, split.effects, strict=False):
        if theirs.term != ours.term:
            raise _not_equal(layer, upstream, theirs.location, f"upstream's {_show(theirs)} became {_show(ours)}")
    _check_lengths(layer, upstream, native, split)
    if native.result != split.result:
        raise _not_equal(layer, upstream, layer.location, "the layer returns other values than upstream's")


def _check_lengths(layer: LayerClass, upstream: Trace, native: Canonical, split: Canonical) -> None:
    common = min(len(native.effects), len(split.effects))
    if lost := native.effects[common:]:
        raise _not_equal(layer, upstream, lost[0].location, f"upstream's {_show(lost[0])} is done by neither half")
    if added := split.effects[common:]:
        raise _not_equal(layer, upstream, added[0].location, f"{_show(added[0])} is done that upstream does not do")


def _show(effect: Effect) -> str:
    return f"`{effect.shown}` ({effect.location})"


def _check_cover(layer: LayerClass, cut: Partition, upstream: Trace, attention: Trace, ffn: Trace) -> None:
    for name, child in upstream.children.items():
        expected = {"attention": child.arguments, "ffn": summed(child.arguments)}
        halves = {"attention": attention, "ffn": ffn}
        twins = {role: twin for role, half in halves.items() if (twin := half.children.get(name))}
        built = {role: twin for role, twin in twins.items() if twin.class_name == child.class_name}
        owner = cut.owner_of(name.partition(".")[0], child.class_name)
        owners = {*names.ROLES} if owner == BOTH else {owner}
        if built.keys() != owners or any(twin.arguments != expected[role] for role, twin in built.items()):
            shown = " and ".join(sorted(built)) or "neither role"
            shown += ", from other arguments" if built.keys() == owners else ""
            saw = f"submodule {name} ({child.class_name}) belongs to {owner} and is built by {shown}"
            raise Refused(
                RefusalKind.OWNERLESS,
                at=child.location,
                name=layer.name,
                saw=saw,
                do="report this layer to afd-compiler: its __init__ builds the submodule in a way that is not followed",
            )


def _check_capture(layer: LayerClass, halves: tuple[Trace, ...]) -> None:
    for half in halves:
        for node in forward_nodes(half.graph):
            if _reads_on_host(node):
                raise _not_capture_safe(layer.name, half.locations[node], f"`{node.target}` reads a tensor on the host")


def _not_capture_safe(name: str, at: Location, saw: str) -> Refused:
    return Refused(
        RefusalKind.NOT_CAPTURE_SAFE,
        at=at,
        name=f"{name}.forward",
        saw=saw,
        do="serve this family unsplit: its forward cannot be recorded in a graph",
    )


def _reads_on_host(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in HOST_READS


def _not_equal(layer: LayerClass, upstream: Trace, at: Location, saw: str) -> Refused:
    return Refused(
        RefusalKind.NOT_EQUAL,
        at=at,
        name=f"{layer.name}.forward",
        saw=f"{saw}, in the variant {upstream.name}",
        do="the cut would change the model here; keep it unsplit, and report the layer to afd-compiler",
    )
