"""The passes in order, for one family: where a refusal becomes an outcome, and the only place.

The layers are looked up in each release. Of releases that look the same to all later passes one is compiled, and the
others come to the same.

A layer can often be cut in more than one way. The ways come in order of preference, and the first that is proved is
taken; if none is, the family is refused for the reason of the first.
"""

import ast
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from afd_compiler.classes import FamilyClasses, LayerClass, classify, file_of
from afd_compiler.construction import Settings, check_construction, find_settings
from afd_compiler.constructs import Constructs, defaults_of
from afd_compiler.diagnostics import RefusalKind, Refused
from afd_compiler.emit import LayerCut, emit
from afd_compiler.outcome import Compiled, CompiledLayer, Content, Origin, Outcome, Refusal, Result
from afd_compiler.partition import partition
from afd_compiler.sandbox import Sandbox
from afd_compiler.source import SourceTree, sha256_of
from afd_compiler.spec import Spec
from afd_compiler.symbolic_torch import symbolic_torch
from afd_compiler.symbols import Symbols
from afd_compiler.trace import Trace, trace
from afd_compiler.verify import Check, Proof, check_module, load_emitted, verify


def compile_family(spec: Spec, tree: SourceTree, platform: str) -> Outcome:
    """Compile one family against one source tree; never raises for what the source holds."""
    return compile_among(spec, Constructs(Symbols(tree, platform))).outcome


def compile_among(spec: Spec, built: Constructs, before: Result | None = None) -> Result:
    """The same, for one of several families: they share the lookup, so that each file is parsed once for all. `before`
    is the result for another release and the same platform."""
    symbols = built.symbols
    origin = Origin(spec, symbols.tree.release, symbols.platform, ())
    try:
        classes = classify(spec, built)
    except Refused as reason:
        return Result(Refusal(origin, None, reason), None, {})
    sources = tuple((file_of(module), sha256_of(symbols.tree.text(module))) for module in classes.opened)
    origin = replace(origin, sources=sources)
    content = Content(classes, sources, tuple(_defaults(layer, built) for layer in classes.layers))
    if before and before.content == content and symbols.agrees(before.answers):
        return replace(before, outcome=replace(before.outcome, origin=origin))
    with symbols.noting() as answers, _one_collection(), symbolic_torch():
        outcome: Outcome
        try:
            outcome = _compile(origin, content, built)
        except Refused as reason:
            outcome = Refusal(origin, classes, reason)
    return Result(outcome, content, answers)


@contextmanager
def _one_collection() -> Iterator[None]:
    """Collect garbage only after a family: among syntax trees and graphs the collector takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compile(origin: Origin, content: Content, built: Constructs) -> Compiled:
    classes = content.classes
    sandbox = Sandbox(built.symbols, classes.opened)
    sandbox.make_leaves([layer.symbol for layer in classes.layers])
    traces = {layer: trace(layer, sandbox) for layer in classes.layers}
    settings = find_settings(classes, built.symbols, traces)
    ways = {
        layer: _ways(layer, variants, defaults, built)
        for (layer, variants), defaults in zip(traces.items(), content.defaults, strict=True)
    }
    first: dict[str, Refused] = {}
    while True:
        chosen = tuple(candidates[0] for candidates in ways.values())
        try:
            return _prove(origin, classes, sandbox, traces, settings, chosen)
        except Refused as reason:
            # What is wrong with the model as a whole can only be the way of its one layer.
            at_fault = [layer for layer in ways if len(ways) == 1 or reason.name.partition(".")[0] == layer.name]
            if not at_fault:
                raise
            layer = at_fault[0]
            first.setdefault(layer.name, reason)
            ways[layer] = ways[layer][1:]
            if not ways[layer]:
                raise first[layer.name] from reason


def _ways(
    layer: LayerClass, traces: tuple[Trace, ...], defaults: tuple[tuple[str, str], ...], built: Constructs
) -> tuple[LayerCut, ...]:
    found = built.method(layer.symbol, "forward")
    if found is None:
        raise Refused(
            RefusalKind.NO_FORM,
            at=layer.location,
            name=layer.name,
            saw="no class of the model files defines the layer's forward",
            do="serve this family unsplit: its layers are not written as such",
        )
    owner, forward = found
    index = built.index(owner.module)
    return tuple(
        LayerCut(layer, cut, forward, index, defaults) for cut in partition(layer, traces, forward, index.names)
    )


def _prove(
    origin: Origin,
    classes: FamilyClasses,
    sandbox: Sandbox,
    traces: dict[LayerClass, tuple[Trace, ...]],
    settings: Settings,
    chosen: tuple[LayerCut, ...],
) -> Compiled:
    """Prove one way; stand-ins are told what upstream's constructors read off them only if they must be."""
    try:
        return _prove_told(origin, classes, sandbox, traces, settings, chosen, {})
    except Refused:
        if not any(settings.read.values()):
            raise
        return _prove_told(origin, classes, sandbox, traces, settings, chosen, settings.read)


def _prove_told(
    origin: Origin,
    classes: FamilyClasses,
    sandbox: Sandbox,
    traces: dict[LayerClass, tuple[Trace, ...]],
    settings: Settings,
    chosen: tuple[LayerCut, ...],
    told: Mapping[str, tuple[str, ...]],
) -> Compiled:
    count = sum(map(len, traces.values())) or len(settings.found)
    text = emit(classes, chosen, told)
    emitted = load_emitted(sandbox, text)
    check_module(classes, sandbox, emitted, text)
    # In one setting first: most often that fails where stand-ins must be told more. All take longest.
    whole = load_emitted(settings.sandbox, text)
    first, *others = settings.found
    check_construction(classes, first, settings.sandbox, whole)
    proofs = [verify(item.layer, item.cut, traces[item.layer], sandbox, emitted) for item in chosen]
    for setting in others:
        check_construction(classes, setting, settings.sandbox, whole)
    tried = len(settings.found)
    detail = f"both roles' whole models are built as upstream's; tried in {tried} settings"
    return Compiled(
        origin,
        classes,
        tuple(_compiled_layer(item, proof) for item, proof in zip(chosen, proofs, strict=True)),
        (Check("construction", count, detail), *_around(classes, tried)),
        text,
    )


def _around(classes: FamilyClasses, tried: int) -> tuple[Check, ...]:
    detail = "the registered model in it is built as upstream's, and the role's wrapper of that model splits it"
    return () if classes.layers else (Check("registered-model", tried, detail),)


def _compiled_layer(item: LayerCut, proof: Proof) -> CompiledLayer:
    file, lines = file_of(item.index.module), item.index.text.splitlines()
    statements = tuple(f"{file}:{line}  {lines[line - 1].strip()}" for line in sorted(item.cut.region.kept))
    return CompiledLayer(item.layer, item.cut, proof, file, statements)


def _defaults(layer: LayerClass, built: Constructs) -> tuple[tuple[str, str], ...]:
    """Upstream's own defaults of the parameters of the FFN's forwards."""
    names = (name for child, group in layer.modules if child in layer.split_children for name in group)
    symbols = [built.resolve(name) for name in names if built.is_moe(name) or built.is_dense(name)]
    found = (built.method(symbol, "forward") for symbol in symbols)
    pairs = ((name, ast.unparse(default)) for item in found if item for name, default in defaults_of(item[1]))
    return tuple(dict.fromkeys(pairs))
