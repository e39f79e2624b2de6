"""A traced forward in canonical form: the sequence of its effects and its result, as nested terms.

Two graphs are isomorphic, on op, target, arguments, keywords and order of effects, exactly if their canonical forms
are equal. Pure nodes are known by what they compute, effects by their place in the sequence; names do not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from afd_compiler.diagnostics import Location
from afd_compiler.effects import forward_nodes, is_effect
from afd_compiler.expressions import target_name
from afd_compiler.sandbox import Leaf
from afd_compiler.trace import Trace
from afd_compiler.tracer import ACTIVATION_DTYPE, REDUCED, UNREDUCED

SEND, RECV = "afd_runtime.ops.send", "afd_runtime.ops.recv"
PARTIAL_SUM = "afd_runtime.ops.partial_sum"
"""Parts of a value by rank. Only their sum matters: what leaves its sum out is what takes it, then parted."""
Term = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect: what it does, in terms, and where it stands."""

    term: Term
    shown: str
    location: Location


@dataclass(frozen=True, slots=True)
class Canonical:
    effects: tuple[Effect, ...]
    result: Any
    hops: int
    """Values received over the wire; 0 for upstream."""

    def __str__(self) -> str:
        """The same text for the same behaviour, whatever the lines it stands on."""
        return repr(([effect.term for effect in self.effects], self.result))


def canonical_form(trace: Trace) -> Canonical:
    """Canonical form of one graph that has no connector nodes."""
    return _Canonicalizer().finish(trace, {})


def composed_form(attention: Trace, ffn: Trace) -> Canonical:
    """Canonical form of the two halves as one, the connector nodes taken as identity."""
    return _Canonicalizer(ffn).finish(attention, {})


def sends(trace: Trace) -> bool:
    """Whether an attention half makes an exchange."""
    return any(target_name(node.target) == SEND for node in trace.graph.nodes)


class _Canonicalizer:
    def __init__(self, ffn: Trace | None = None) -> None:
        self.ffn = ffn
        self.effects: list[Effect] = []
        self.hops = 0

    def finish(self, trace: Trace, inputs: Mapping[str, Any]) -> Canonical:
        result = self.walk(trace, inputs)
        return Canonical(tuple(self.effects), result, self.hops)

    def walk(self, trace: Trace, inputs: Mapping[str, Any]) -> Any:
        """Append the graph's effects and return the term of its output; `inputs` are terms of placeholders."""
        terms: dict[fx.Node, Any] = {}
        in_forward = set(forward_nodes(trace.graph))
        for node in trace.graph.nodes:
            if node.op == "output":
                return _term(node.args[0], terms)
            if node.op == "placeholder":
                terms[node] = inputs.get(str(node.target), ("input", str(node.target)))
                continue
            term = self.describe(node, trace, terms)
            if self.ffn is not None and target_name(node.target) in (SEND, RECV):
                terms[node] = self.connect(node, terms)
            elif target_name(node.target) == PARTIAL_SUM:
                terms[node] = ("part of", _term(node.args[0], terms))
            elif node in in_forward and is_effect(node):
                done: Term = ("effect", len(self.effects))
                terms[node] = ("part of", done) if _leaves_sum_out(node, trace) else done
                shown = f"{node.op} {target_name(node.target)}"
                self.effects.append(Effect(term, shown, trace.locations[node]))
            else:
                terms[node] = term
        raise AssertionError("a traced graph ends with its output")

    def describe(self, node: fx.Node, trace: Trace, terms: Mapping[fx.Node, Any]) -> Term:
        target: Any = target_name(node.target)
        if node.op == "call_module":
            child = trace.children[str(node.target)]
            target = (child.name, child.class_name, summed(child.arguments))
        keywords = tuple(sorted((name, _term(value, terms)) for name, value in node.kwargs.items()))
        return (node.op, target, tuple(_term(value, terms) for value in node.args), keywords)

    def connect(self, node: fx.Node, terms: Mapping[fx.Node, Any]) -> Any:
        """A send is its value in flight; a receive on that ticket is the FFN half applied to the value."""
        args = [_term(value, terms) for value in node.args]
        if target_name(node.target) == SEND:
            return ("ticket", args[0], args[1], args[3])
        ticket, tokens, hidden, dtype, layer = args
        whole = isinstance(ticket, tuple) and ticket[0] == "ticket" and ticket[2] == layer
        assert self.ffn is not None  # checked by the caller
        if not whole or (tokens, hidden) != _sizes(ticket[1]) or dtype not in _dtypes(ticket[1]):
            return ("lost", *args)
        sent = (ticket[1], *ticket[3][1:])
        if len(sent) != len(self.ffn.inputs):
            return ("lost", *args)
        self.hops += 1
        return self.walk(self.ffn, dict(zip(self.ffn.inputs, sent, strict=True)))


def summed(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """A constructor's arguments as the role passes them that takes the sum over ranks."""
    return tuple(REDUCED if text == UNREDUCED else text for text in arguments)


def _leaves_sum_out(node: fx.Node, trace: Trace) -> bool:
    return node.op == "call_module" and UNREDUCED in trace.children[str(node.target)].arguments


def _dtypes(tensor: Any) -> tuple[Any, Any]:
    """What a tensor's dtype may be called: the activations', or its own."""
    return ("input", ACTIVATION_DTYPE), ("call_function", "builtins.getattr", (tensor, "dtype"), ())


def _sizes(tensor: Any) -> tuple[Any, Any]:
    shape = ("call_function", "builtins.getattr", (tensor, "shape"), ())
    first, second = (("call_function", "_operator.getitem", (shape, axis), ()) for axis in (0, 1))
    return first, second


def _term(value: Any, terms: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return terms[value]
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_term(item, terms) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _term(item, terms)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_term(part, terms) for part in (value.start, value.stop, value.step)))
    if isinstance(value, Leaf):
        return type(value).__name__
    return value if isinstance(value, str | int | float | bool | None) else str(value)
