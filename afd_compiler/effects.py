"""Which nodes of a traced forward do something besides giving a value; their order is part of what a layer means."""

import operator
from collections.abc import Iterator

from torch import fx

from afd_compiler.sandbox import Stub
from afd_compiler.symbolic import IN_PLACE_OPERATORS
from afd_compiler.tracer import ACTIVATION_DTYPE

GETITEM = operator.getitem


def forward_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that forward made, construction's and the inputs left out."""
    nodes = iter(graph.nodes)
    for node in nodes:
        if node.op == "placeholder" and node.target == ACTIVATION_DTYPE:
            break
    yield from nodes


def is_effect(node: fx.Node) -> bool:
    """Submodule calls, collectives and other functions from outside, in-place operators and methods."""
    if node.op == "call_module":
        return True
    if node.op == "call_method":
        name = str(node.target)
        return (
            child_of(node) is not None
            or name in ("__call__", "__enter__", "__exit__")
            or (name.endswith("_") and not name.endswith("__"))
        )
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    # torch marks in-place functions by a trailing underscore; `operator.is_` and its like only avoid a keyword.
    in_place = name.endswith("_") and getattr(operator, name, None) is not node.target
    return in_place or node.target in IN_PLACE_OPERATORS or (isinstance(node.target, Stub) and "." in str(node.target))


def child_of(node: fx.Node) -> str | None:
    """The submodule of the layer that a node calls, directly or by a method of something inside it."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "call_method" and isinstance(owner := node.args[0], fx.Node) and owner.op == "get_attr":
        return str(owner.target).partition(".")[0]
    return None
