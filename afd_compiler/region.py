"""Which statements of a forward hold the FFN side, and which local names go in and come out."""

import ast
import builtins
from collections.abc import Iterable
from dataclasses import dataclass

from afd_compiler.diagnostics import Location, RefusalKind, Refused


@dataclass(frozen=True, slots=True)
class Region:
    """Statements of one method, by the line that each starts on."""

    kept: frozenset[int]
    reads: tuple[str, ...]
    """Local names that the statements read before they write them: what is sent."""
    writes: tuple[str, ...]
    """Local names that they assign: what can be returned, the last one last."""
    boundary: tuple[tuple[int, str], ...]
    """(line, text) of the calls that make the boundary."""


def region_of(
    function: ast.FunctionDef,
    *,
    ffn_lines: frozenset[int],
    attention_lines: frozenset[int],
    file: str,
    known: Iterable[str],
) -> Region:
    """Collect the statements on `ffn_lines`, with the conditions around them. `known` are the module's global names."""
    kept: list[ast.stmt] = []
    _collect(function.body, ffn_lines, kept, file)
    simple = [node for node in kept if not isinstance(node, ast.If)]
    for node in simple:
        if mixed := attention_lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
            raise _no_form(file, min(mixed), f"the statement `{ast.unparse(node)}` does work of both sides")
    reads, writes = _names(kept, {*known, *dir(builtins), "self"})
    return Region(
        kept=frozenset(node.lineno for node in kept),
        reads=reads,
        writes=writes,
        boundary=tuple(_calls(simple, ffn_lines)),
    )


def _collect(statements: list[ast.stmt], lines: frozenset[int], kept: list[ast.stmt], file: str) -> bool:
    """Append the statements that hold a wanted line, each `if` before what it guards; say whether there are any."""
    found = False
    for node in statements:
        inside = lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if not inside:
            continue
        if isinstance(node, ast.If):
            kept.append(node)
            held = [_collect(branch, lines, kept, file) for branch in (node.body, node.orelse)]
            if not any(held):
                kept.remove(node)  # only its test is on a wanted line
                continue
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
            kept.append(node)
        else:
            raise _no_form(file, min(inside), f"FFN work inside a `{type(node).__name__}` statement")
        found = True
    return found


def _names(kept: list[ast.stmt], known: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for statement in kept:
        roots: list[ast.AST] = [statement.test] if isinstance(statement, ast.If) else [statement]
        names = [node for root in roots for node in ast.walk(root) if isinstance(node, ast.Name)]
        loads = [node.id for node in names if isinstance(node.ctx, ast.Load)]
        stores = [node.id for node in names if isinstance(node.ctx, ast.Store)]
        if isinstance(statement, ast.AugAssign):
            loads += stores
        reads |= dict.fromkeys(name for name in loads if name not in writes and name not in known)
        for name in stores:
            writes.pop(name, None)  # the latest assignment last
            writes[name] = None
    return tuple(reads), tuple(writes)


def _calls(statements: list[ast.stmt], lines: frozenset[int]) -> Iterable[tuple[int, str]]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and node.lineno in lines and ast.unparse(node.func).startswith("self."):
                yield node.lineno, ast.unparse(node)


def _no_form(file: str, line: int, saw: str) -> Refused:
    return Refused(
        RefusalKind.NO_FORM,
        at=Location(file, line),
        name="forward",
        saw=saw,
        do="serve this family unsplit: the FFN's work must stand in assignments of its own, outside loops",
    )
