"""Part of the proof: a role's whole model can be built wherever upstream's can, and holds what the role owns.

Upstream's causal LM and model constructors are executed symbolically, upstream's own and then the emitted roles' under
the same answers, with one layer standing for all of them. The layer's own questions are answered as in one variant for
each kind of FFN; of the others `MOST_PATHS` combinations are tried.
"""

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from afd_compiler import names
from afd_compiler.classes import LayerClasses
from afd_compiler.diagnostics import RefusalKind, Refused
from afd_compiler.sandbox import Sandbox
from afd_compiler.symbols import ModuleIndex, Symbols
from afd_compiler.trace import Trace, UpstreamRaised, tracing
from afd_compiler.tracer import LayerTracer

MOST_PATHS = 12
UTILS = "vllm.model_executor.models.utils"
Answers = dict[str, bool]


def check_construction(
    classes: LayerClasses,
    symbols: Symbols,
    index: ModuleIndex,
    traces: tuple[Trace, ...],
    load: Callable[[Sandbox], ModuleType],
) -> int:
    """Raise `Refused` where a role's constructor fails or builds what it does not own; return how many were tried.

    `load` executes the emitted module in a sandbox.
    """
    sandbox = Sandbox(symbols, understood={f"{UTILS}.make_layers": _make_layers})
    upstream = sandbox.execute(classes.module, classes.file, index.text)
    emitted = load(sandbox)
    sandbox.make_leaves(upstream, {getattr(upstream, name) for name in classes.outer})
    constructors = {getattr(upstream, name).__init__: name for _, name in reversed(classes.architectures)}
    tried = 0
    for start in _starts(classes, traces):
        for name in constructors.values():
            for answers in _native_paths(sandbox, getattr(upstream, name), classes, start):
                tried += 1
                for role in ("attention", "ffn"):
                    _check_role(sandbox, emitted, role, name, classes, answers)
    if not tried:
        raise _refused(classes, classes.outer[-1], "upstream's own constructor cannot be followed")
    return tried


def _starts(classes: LayerClasses, traces: tuple[Trace, ...]) -> list[Mapping[str, bool]]:
    kinds = {tuple(trace.children[name].class_name for name in classes.ffn_children): trace.answers for trace in traces}
    return list(kinds.values())


def _native_paths(sandbox: Sandbox, model: type, classes: LayerClasses, start: Mapping[str, bool]) -> Iterator[Answers]:
    """Answers under which upstream's own constructor succeeds; paths that it refuses itself, or that cannot be
    followed, say nothing about the split."""
    pending = [dict(start)]
    for _ in range(MOST_PATHS):
        if not pending:
            return
        answers = pending.pop(0)
        tracer = LayerTracer(sandbox, frozenset(), answers, forks=True)
        try:
            _build(sandbox, tracer, model, classes)
            yield dict(tracer.answers)
        except (Refused, UpstreamRaised):
            pass
        fresh = [question for question in tracer.asked if question not in answers]
        for position, question in enumerate(fresh):
            earlier = {name: tracer.asked[name] for name in fresh[:position]}
            pending.append({**answers, **earlier, question: not tracer.asked[question]})


def _build(sandbox: Sandbox, tracer: LayerTracer, model: type, classes: LayerClasses) -> Any:
    with tracing(sandbox, tracer, classes.layer):
        return tracer.construct(model, {"vllm_config": tracer.input("vllm_config"), "prefix": ""})


def _check_role(
    sandbox: Sandbox, emitted: ModuleType, role: str, name: str, classes: LayerClasses, answers: Answers
) -> None:
    model = getattr(emitted, names.causal_lm_class(role, name))
    tracer = LayerTracer(sandbox, frozenset(), answers, forks=True)
    try:
        built = _build(sandbox, tracer, model, classes)
    except UpstreamRaised as raised:
        raise _refused(classes, name, f"on the {role} role it raises {raised}") from raised
    except Refused as reason:
        raise _refused(classes, name, f"on the {role} role: {reason.saw} ({reason.at})") from reason
    layer = getattr(emitted, names.ATTENTION_LAYER if role == "attention" else names.FFN_LAYER)
    native = getattr(sandbox.name(classes.module), classes.layer)
    layers = [module for module in built.modules() if isinstance(module, native)]
    if not layers or not all(isinstance(module, layer) for module in layers):
        raise _refused(classes, name, f"the {role} role does not build {layer.__name__} for every layer")
    if role == "ffn" and (kept := _kept_around(sandbox, built, layer)):
        raise _refused(classes, name, f"the ffn role builds {', '.join(kept)}, which attention owns")


def _kept_around(sandbox: Sandbox, built: torch.nn.Module, layer: type) -> list[str]:
    """Submodules outside the layers that are really built."""
    missing = sandbox.class_of(sandbox.name(f"{UTILS}.PPMissingLayer"))
    inside = [name for name, module in built.named_modules() if isinstance(module, layer)]
    return [
        name
        for name, module in built.named_modules()
        if not any(name == path or name.startswith(f"{path}.") for path in inside)
        and sandbox.is_leaf(module)
        and not isinstance(module, missing)
    ]


def _make_layers(_: Any, build: Callable[..., torch.nn.Module], prefix: str) -> tuple[int, int, torch.nn.ModuleList]:
    """vLLM's `make_layers`, with one layer for all."""
    return 0, 1, torch.nn.ModuleList([build(prefix=f"{prefix}.0")])


def _refused(classes: LayerClasses, name: str, saw: str) -> Refused:
    return Refused(
        RefusalKind.CONSTRUCTION,
        at=classes.location,
        name=f"{name}.__init__",
        saw=saw,
        do="serve this family unsplit: its constructors need what the other role owns",
    )
