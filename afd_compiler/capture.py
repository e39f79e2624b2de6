"""Capture safety of code that is ours: what a CUDA or ACL graph would not record, or would record once and for all.

On replay no Python runs. So between the tensor operations of a step nothing may read a tensor on the host, take data
from the host, keep state in Python, or do anything else that has to happen again. Memory that a forward allocates is
fine: it comes from the graph's own pool and keeps its address.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from afd_compiler.diagnostics import Location

HOST_READS = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"})
"""Methods that make the host wait for a tensor's values."""
HOST_DATA = frozenset({"tensor", "as_tensor", "from_numpy", "pin_memory", "frombuffer"})
"""Functions that copy from host memory, whose address a graph would keep."""
SIDE_EFFECTS = frozenset({"print", "open", "input", "exec", "eval", "setattr", "delattr"})
OUTSIDE = frozenset({"time", "random", "os", "sys", "logging", "logger", "threading", "warnings"})
"""Modules whose functions are done while recording, and never again."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """A place that is not capture-safe."""

    at: Location
    saw: str


def hazards_of(text: str, file: str, functions: frozenset[str]) -> tuple[Hazard, ...]:
    """Hazards in the functions and methods of these names, in source order."""
    wanted = (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name in functions
    )
    return tuple(
        Hazard(Location(file, line), f"`{function.name}` {saw}")
        for function in wanted
        for node in ast.walk(function)
        for line, saw in _hazards_at(node)
    )


def _hazards_at(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case (
            ast.Attribute(ctx=ast.Store() | ast.Del(), lineno=line)
            | ast.Global(lineno=line)
            | ast.Nonlocal(lineno=line)
        ):
            yield line, f"keeps state in Python: `{ast.unparse(node)}`"
        case ast.Call(func=ast.Attribute(attr=name), lineno=line) if name in HOST_READS:
            yield line, f"reads a tensor on the host: `{ast.unparse(node)}`"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), lineno=line) if name in HOST_DATA:
            yield line, f"takes data from the host: `{ast.unparse(node)}`"
        case ast.Call(func=ast.Name(id=name), lineno=line) if name in SIDE_EFFECTS:
            yield line, f"does what a replay would not: `{ast.unparse(node)}`"
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name)), lineno=line) if name in OUTSIDE:
            yield line, f"does what a replay would not: `{ast.unparse(node)}`"
