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

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from torch import fx

from afd_compiler import names
from afd_compiler.canonical import Canonical, Effect, canonical_form, composed_form
from afd_compiler.capture import HOST_READS, hazards_of
from afd_compiler.classes import LayerClasses
from afd_compiler.construction import check_construction
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.effects import forward_nodes
from afd_compiler.partition import Partition
from afd_compiler.sandbox import Sandbox
from afd_compiler.source import sha256_of
from afd_compiler.symbols import ModuleIndex
from afd_compiler.trace import Trace, trace_one

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
    """What was proved of an emitted module."""

    variants: tuple[str, ...]
    checks: tuple[Check, ...]
    behaviour: str
    """Hash of what upstream's layer does in all its variants; equal hashes mean equal layers, across releases too."""


def verify(
    classes: LayerClasses,
    cut: Partition,
    traces: tuple[Trace, ...],
    sandbox: Sandbox,
    index: ModuleIndex,
    text: str,
) -> Proof:
    """Prove the emitted text against all traces, or raise `Refused` with a counterexample."""
    emitted = _execute(sandbox, text)
    _check_causal_lms(classes, sandbox, emitted)
    _check_emitted_code(classes, text)
    for upstream in traces:
        attention = _half(sandbox, emitted, names.ATTENTION_LAYER, classes, upstream)
        ffn = _half(sandbox, emitted, names.FFN_LAYER, classes, upstream)
        _check_translation(classes, upstream, attention, ffn)
        _check_cover(classes, cut, upstream, attention, ffn)
        _check_capture(classes, (attention, ffn))
    built = check_construction(classes, sandbox.symbols, index, traces, lambda other: _execute(other, text))
    count = len(traces)
    return Proof(
        variants=tuple(trace.name for trace in traces),
        checks=(
            Check("translation", count, "upstream's graph equals the two halves joined at the connector nodes"),
            Check("weight-cover", count, "every submodule is built by exactly one role, as upstream builds it"),
            Check("capture-safety", count, "no host read of a tensor, one exchange per layer"),
            Check(
                "construction", count, f"both roles' whole models are built as upstream's; tried in {built} settings"
            ),
        ),
        behaviour=sha256_of(repr([_behaviour(trace) for trace in traces])),
    )


def _behaviour(trace: Trace) -> tuple[object, ...]:
    children = [(child.name, child.class_name, child.arguments) for child in trace.children.values()]
    return (trace.name, trace.constructions, trace.inputs, children, str(canonical_form(trace)))


def _execute(sandbox: Sandbox, text: str) -> ModuleType:
    found = find_spec(RUNTIME_MODULE.partition(".")[0])
    assert found is not None  # same distribution
    assert found.origin is not None
    split = Path(found.origin).with_name(RUNTIME_MODULE.rpartition(".")[2] + ".py")
    sandbox.execute(RUNTIME_MODULE, "afd_runtime/split.py", split.read_text(encoding="utf-8"))
    return sandbox.execute(EMITTED_MODULE, EMITTED_FILE, text)


def _half(sandbox: Sandbox, emitted: ModuleType, name: str, classes: LayerClasses, upstream: Trace) -> Trace:
    entered = frozenset({EMITTED_MODULE, RUNTIME_MODULE})
    layer = getattr(emitted, name)
    try:
        _, half = trace_one(
            sandbox, layer, classes, upstream.answers, forks=False, entered=entered, received=name == names.FFN_LAYER
        )
    except Refused as reason:
        raise _not_equal(classes, upstream, classes.location, f"{name} cannot be followed: {reason.saw}") from reason
    return half


def _check_translation(classes: LayerClasses, upstream: Trace, attention: Trace, ffn: Trace) -> None:
    native, split = canonical_form(upstream), composed_form(attention, ffn)
    if split.hops != 1:
        raise _not_equal(classes, upstream, classes.location, f"the split makes {split.hops} exchanges instead of one")
    for theirs, ours in zip(native.effects, split.effects, strict=False):
        if theirs.term != ours.term:
            raise _not_equal(classes, upstream, theirs.location, f"upstream's {_show(theirs)} became {_show(ours)}")
    _check_lengths(classes, upstream, native, split)
    if native.result != split.result:
        raise _not_equal(classes, upstream, classes.location, "the layer returns other values than upstream's")


def _check_lengths(classes: LayerClasses, upstream: Trace, native: Canonical, split: Canonical) -> None:
    common = min(len(native.effects), len(split.effects))
    if lost := native.effects[common:]:
        raise _not_equal(classes, upstream, lost[0].location, f"upstream's {_show(lost[0])} is done by neither half")
    if added := split.effects[common:]:
        raise _not_equal(classes, upstream, added[0].location, f"{_show(added[0])} is done that upstream does not do")


def _show(effect: Effect) -> str:
    return f"`{effect.shown}` ({effect.location})"


def _check_cover(classes: LayerClasses, cut: Partition, upstream: Trace, attention: Trace, ffn: Trace) -> None:
    owners = dict(cut.owners)
    for name, child in upstream.children.items():
        built = {
            role
            for role, half in (("attention", attention), ("ffn", ffn))
            if (twin := half.children.get(name))
            and (twin.class_name, twin.arguments) == (child.class_name, child.arguments)
        }
        if built != {owners.get(name)}:
            shown = " and ".join(sorted(built)) or "neither role"
            saw = f"submodule {name} ({child.class_name}) belongs to {owners.get(name)} and is built by {shown}"
            raise Refused(
                RefusalKind.OWNERLESS,
                at=child.location,
                name=classes.layer,
                saw=saw,
                do="report this layer to afd-compiler: its __init__ builds the submodule in a way that is not followed",
            )


def _check_capture(classes: LayerClasses, halves: tuple[Trace, ...]) -> None:
    for half in halves:
        for node in forward_nodes(half.graph):
            if _reads_on_host(node):
                raise Refused(
                    RefusalKind.NOT_CAPTURE_SAFE,
                    at=half.locations[node],
                    name=f"{classes.layer}.forward",
                    saw=f"`{node.target}` reads a tensor on the host",
                    do="serve this family unsplit: its forward cannot be recorded in a graph",
                )


def _check_emitted_code(classes: LayerClasses, text: str) -> None:
    for hazard in hazards_of(text, EMITTED_FILE, frozenset({"forward"})):
        raise Refused(
            RefusalKind.NOT_CAPTURE_SAFE,
            at=classes.location,
            name=f"{classes.layer}.forward",
            saw=f"{hazard.saw} ({hazard.at})",
            do="serve this family unsplit: its forward cannot be recorded in a graph",
        )


def _reads_on_host(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in HOST_READS


def _check_causal_lms(classes: LayerClasses, sandbox: Sandbox, emitted: ModuleType) -> None:
    native = sandbox.name(classes.module)
    for _, name in classes.architectures:
        for role in ("attention", "ffn"):
            if not issubclass(getattr(emitted, names.causal_lm_class(role, name)), getattr(native, name)):
                raise AssertionError(f"emitted {role} class of {name} does not derive from upstream's")


def _not_equal(classes: LayerClasses, upstream: Trace, at: Location, saw: str) -> Refused:
    return Refused(
        RefusalKind.NOT_EQUAL,
        at=at,
        name=f"{classes.layer}.forward",
        saw=f"{saw}, in the variant {upstream.name}",
        do="the cut would change the model here; keep it unsplit, and report the layer to afd-compiler",
    )
