"""Fourth pass: every path through the decoder layer as one torch.fx graph, with upstream file:line on each node.

1. Construction is explored alone: all answers to all questions that `__init__` asks.
2. Constructions that give the layer the same submodule classes and the same attributes are one case.
3. For each case the forward is explored. Each path is one variant.

Worst case: exponential in the number of independent questions; more than `MOST_PATHS` paths is a refusal.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch import fx

from afd_compiler.classes import LayerClass
from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.sandbox import Sandbox
from afd_compiler.symbolic_torch import recorded_by
from afd_compiler.tracer import UNREDUCED, Child, LayerTracer

MOST_PATHS = 2000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trace:
    """One variant of a layer."""

    name: str
    """What sets it apart, for people: submodule classes and the questions that forward asked."""
    answers: Mapping[str, bool]
    constructions: tuple[str, ...]
    """The answers in `__init__` that lead to this case, and what its submodules are then built from: a text a way."""
    children: Mapping[str, Child]
    inputs: tuple[str, ...]
    """Forward's parameters."""
    graph: fx.Graph
    locations: Mapping[fx.Node, Location]


def trace(layer: LayerClass, sandbox: Sandbox) -> tuple[Trace, ...]:
    """Trace all variants of the layer, in a stable order; raise `Refused` where one cannot be followed.

    The sandbox has opened the layer's modules and made leaves of all but the layers.
    """
    cls = sandbox.cls(layer.symbol)
    cases: dict[str, list[tuple[Mapping[str, bool], _Construction]]] = {}
    for answers, way in _explore(lambda known: _construct_only(sandbox, cls, layer, known), {}, layer):
        cases.setdefault(way.key, []).append((answers, way))
    return tuple(
        replace(variant, constructions=tuple(f"{_answers_text(answers)}: {way.arguments}" for answers, way in ways))
        for ways in cases.values()
        for _, variant in _explore(lambda known: trace_one(sandbox, cls, layer, known, forks=True), ways[0][0], layer)
    )


def trace_one(
    sandbox: Sandbox,
    cls: type,
    layer: LayerClass,
    answers: Mapping[str, bool],
    *,
    forks: bool,
    entered: frozenset[str] = frozenset(),
    received: bool = False,
    forward: bool = True,
) -> tuple[dict[str, bool], Trace]:
    """Run one path of a layer class, upstream's or emitted; the layer's constructor arguments are symbolic.

    `received` says that forward's first input is an activation, as the FFN role's is. Without `forward` the layer is
    built only.
    """
    tracer = LayerTracer(sandbox, entered, answers, forks=forks, received=received)
    with tracing(sandbox, tracer, layer.name):
        root = tracer.construct(cls, constructor_arguments(tracer, layer), layer.set_outside)
        constructed = dict(tracer.asked)
        inputs = forward_parameters(type(root)) if forward else ()
        output = tracer.graph.output(tracer.create_arg(tracer.forward(root, inputs)) if forward else None)
        tracer.locations[output] = layer.location
    asked_in_forward = {question: yes for question, yes in tracer.asked.items() if question not in constructed}
    variant = Trace(
        name=_variant_name(tracer, root, asked_in_forward, layer),
        answers=MappingProxyType(dict(tracer.answers)),
        constructions=(),
        children=MappingProxyType(dict(tracer.children)),
        inputs=inputs,
        graph=tracer.graph,
        locations=MappingProxyType(tracer.locations),
    )
    return tracer.asked, variant


def constructor_arguments(tracer: LayerTracer, layer: LayerClass) -> dict[str, Any]:
    """Symbolic values for the keywords that upstream's model passes."""
    return {name: tracer.input(name) for name in layer.arguments}


def forward_parameters(layer: type) -> tuple[str, ...]:
    """Names of forward's parameters, without self and without what only `**kwargs` takes."""
    parameters = inspect.signature(layer.forward).parameters.values()  # type: ignore[attr-defined]  # layers have one
    return tuple(item.name for item in parameters if item.kind is not item.VAR_KEYWORD)[1:]


@dataclass(frozen=True, slots=True)
class _Construction:
    """One way through `__init__`."""

    key: str
    """Equal keys mean equal forwards."""
    arguments: str
    """What the submodules are built from."""


def _construct_only(
    sandbox: Sandbox, cls: type, layer: LayerClass, answers: Mapping[str, bool]
) -> tuple[dict[str, bool], _Construction]:
    """Build the layer, and describe the outcome."""
    tracer = LayerTracer(sandbox, frozenset(), answers, forks=True)
    with tracing(sandbox, tracer, layer.name):
        root = tracer.construct(cls, constructor_arguments(tracer, layer), layer.set_outside)
        plain = {name: value for name, value in vars(root).items() if name not in tracer.children and name[0] != "_"}
        # A flag that this path has decided is that decision, however it came about.
        attributes = {name: _first(tracer.settled(value), tracer.value_text(value)) for name, value in plain.items()}
        kinds = {name: (child.class_name, UNREDUCED in child.arguments) for name, child in tracer.children.items()}
    arguments = repr({name: child.arguments for name, child in tracer.children.items()})
    return tracer.asked, _Construction(repr((sorted(kinds.items()), sorted(attributes.items()))), arguments)


def _first(decided: bool | None, text: str) -> str:
    return text if decided is None else str(decided)


def _explore(
    run: Callable[[Mapping[str, bool]], tuple[dict[str, bool], T]], known: Mapping[str, bool], layer: LayerClass
) -> Iterator[tuple[dict[str, bool], T]]:
    """Run with every combination of answers that the run can reach, starting from those known."""
    pending: list[dict[str, bool]] = [dict(known)]
    paths = 0
    while pending:
        answers = pending.pop()
        paths += 1
        if paths > MOST_PATHS:
            raise _too_many(layer)
        try:
            asked, outcome = run(answers)
        except UpstreamRaised as raised:
            asked, outcome = raised.asked, None
        pending += other_paths(answers, asked)
        if outcome is not None:
            yield {**answers, **asked}, outcome


def other_paths(answers: Mapping[str, bool], asked: Mapping[str, bool]) -> Iterator[dict[str, bool]]:
    """Answers that lead to the paths which part from this run's: one for each question it answered by itself.

    The deepest question comes last, so that it is flipped first and the order of variants follows the source.
    """
    fresh = [question for question in asked if question not in answers]
    for position, question in enumerate(fresh):
        earlier = {name: asked[name] for name in fresh[:position]}
        yield {**answers, **earlier, question: not asked[question]}


class UpstreamRaised(Exception):
    def __init__(self, asked: dict[str, bool], text: str) -> None:
        super().__init__(text)
        self.asked = asked


@contextmanager
def tracing(sandbox: Sandbox, tracer: LayerTracer, name: str) -> Iterator[None]:
    sandbox.tracer = tracer
    try:
        with recorded_by(tracer):
            yield
    except Refused:
        raise
    except Exception as error:
        if sandbox.raised_by_source(error) and isinstance(error, AssertionError | ValueError | RuntimeError):
            raise UpstreamRaised(dict(tracer.asked), f"{type(error).__name__}: {error}") from error
        raise Refused(
            RefusalKind.UNTRACEABLE,
            at=sandbox.where(error) or Location("<inputs>", 0),
            name=name,
            saw=f"{type(error).__name__}: {str(error).partition('. ')[0]}",
            do="serve this family unsplit: its forward cannot be followed symbolically here",
        ) from error
    finally:
        sandbox.tracer = None


def _variant_name(tracer: LayerTracer, root: Any, asked: Mapping[str, bool], layer: LayerClass) -> str:
    """Submodule classes and forward's questions, with attributes in place of the expressions that made them."""
    kinds = [f"{name}={child.class_name}" for name, child in tracer.children.items() if name in layer.split_children]
    known = {
        tracer.value_text(value): f"self.{name}" for name, value in vars(root).items() if tracer.is_symbolic(value)
    }
    shown = {}
    for question, yes in asked.items():
        for text in sorted(known, key=len, reverse=True):
            question = question.replace(text, known[text])
        shown[question] = yes
    settled = (f"self.{name}" for name, value in vars(root).items() if name != "training" and tracer.settled(value))
    flags = [flag for flag in settled if flag not in shown]
    return ", ".join([*kinds, *flags, *filter(None, [_answers_text(shown)])])


def _answers_text(answers: Mapping[str, bool]) -> str:
    return ", ".join(question if yes else f"not ({question})" for question, yes in answers.items())


def _too_many(layer: LayerClass) -> Refused:
    return Refused(
        RefusalKind.TOO_MANY_VARIANTS,
        at=layer.location,
        name=layer.name,
        saw=f"more than {MOST_PATHS} paths through the layer",
        do="split the spec by architecture, or fix an option in it",
    )
