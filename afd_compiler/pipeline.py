"""The passes in order, for one family: where a refusal becomes an outcome, and the only place."""

from afd_compiler.classes import LayerClasses, classify
from afd_compiler.diagnostics import RefusalKind, Refused
from afd_compiler.emit import emit
from afd_compiler.outcome import Compiled, Origin, Outcome, Refusal
from afd_compiler.partition import partition
from afd_compiler.region import Region
from afd_compiler.report import header_lines
from afd_compiler.sandbox import Sandbox
from afd_compiler.source import SourceTree, sha256_of
from afd_compiler.spec import Spec
from afd_compiler.symbols import ModuleIndex, Symbols
from afd_compiler.trace import trace
from afd_compiler.verify import verify


def compile_family(spec: Spec, tree: SourceTree, platform: str) -> Outcome:
    """Compile one family against one source tree; never raises for what the source holds."""
    symbols = Symbols(tree, platform)
    index = symbols.index(spec.module)
    origin = Origin(spec, tree.release, platform, sha256_of(index.text) if index else "")
    classes = None
    try:
        classes = classify(spec, symbols)
        assert index is not None  # classify refuses a missing module
        return _compile(origin, classes, symbols, index)
    except Refused as reason:
        return Refusal(origin, classes, reason)


def _compile(origin: Origin, classes: LayerClasses, symbols: Symbols, index: ModuleIndex) -> Compiled:
    forward = index.method(classes.layer, "forward")
    if forward is None:
        raise Refused(
            RefusalKind.NO_FORM,
            at=classes.location,
            name=classes.layer,
            saw="the layer inherits its forward from another class",
            do="name the module of that class in the spec",
        )
    sandbox = Sandbox(symbols)
    upstream = sandbox.execute(classes.module, classes.file, index.text)
    traces = trace(classes, sandbox, upstream)
    cut = partition(classes, traces, forward, index.names)
    text = emit(classes, cut, index, header_lines(origin, classes, cut, len(traces)))
    proof = verify(classes, cut, traces, sandbox, index, text)
    return Compiled(origin, classes, cut, proof, text, _statements(classes, cut.region, index))


def _statements(classes: LayerClasses, region: Region, index: ModuleIndex) -> tuple[str, ...]:
    lines = index.text.splitlines()
    return tuple(f"{classes.file}:{line}  {lines[line - 1].strip()}" for line in sorted(region.kept))
