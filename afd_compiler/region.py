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
    span: frozenset[int]
    """Statements of the innermost block around them all, from the first that holds some to the last."""
    reads: tuple[str, ...]
    """Local names that the statements read before they write them: what is sent."""
    writes: tuple[str, ...]
    """Local names that they assign: what can be returned, the last one last."""
    boundary: tuple[tuple[int, str], ...]
    """(line, text) of the calls that make the boundary."""
    call: str = ""
    """The FFN's side as one expression, where it is a call that need not stand in a statement of its own."""


def region_of(
    function: ast.FunctionDef,
    *,
    ffn_lines: frozenset[int],
    attention_lines: frozenset[int],
    active_lines: frozenset[int],
    file: str,
    known: Iterable[str],
) -> Region:
    """Collect the statements on `ffn_lines`, with the conditions around them, and those that set what they read
    without touching `active_lines`. `known` are the module's global names.
    """
    known = {*known, *dir(builtins), "self"}
    kept, (reads, writes) = _kept(function, ffn_lines, file, known)
    while added := {line for name in reads for line in _constant_settings(function, name, active_lines)} - ffn_lines:
        ffn_lines |= added
        kept, (reads, writes) = _kept(function, ffn_lines, file, known)
    if not kept:
        raise _no_form(file, min(ffn_lines), f"FFN work outside `{function.name}`, in something that it calls")
    simple = [node for node in kept if not isinstance(node, ast.If)]
    for node in simple:
        if mixed := attention_lines & _lines_of(node):
            raise _no_form(file, min(mixed), f"the statement `{ast.unparse(node)}` does work of both sides")
    return Region(
        kept=frozenset(node.lineno for node in kept),
        span=_span(function.body, {node.lineno for node in kept}),
        reads=reads,
        writes=writes,
        boundary=tuple(_calls(simple, ffn_lines)),
    )


def _kept(
    function: ast.FunctionDef, lines: frozenset[int], file: str, known: set[str]
) -> tuple[list[ast.stmt], tuple[tuple[str, ...], tuple[str, ...]]]:
    """The statements that hold a wanted line, and what they read and write."""
    kept: list[ast.stmt] = []
    _collect(function.body, lines, kept, file)
    return kept, _names(kept, known)


def _collect(statements: list[ast.stmt], lines: frozenset[int], kept: list[ast.stmt], file: str) -> bool:
    """Append the statements that hold a wanted line, each `if` before what it guards; say whether there are any."""
    found = False
    for node in statements:
        inside = lines & _lines_of(node)
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


def _constant_settings(function: ast.FunctionDef, name: str, active_lines: frozenset[int]) -> Iterable[int]:
    """Lines of assignments to a local name that do no work on the step's tensors."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                is_alias = isinstance(value, ast.Name)  # of an activation, perhaps: that makes no node either
                if not is_alias and not active_lines & _lines_of(node):
                    yield node.lineno


def _span(block: list[ast.stmt], lines: set[int]) -> frozenset[int]:
    holding = [position for position, node in enumerate(block) if lines & _lines_of(node)]
    if not holding:
        return frozenset()
    first, last = block[holding[0]], block[holding[-1]]
    if first is last and isinstance(first, ast.If):
        inner = [branch for branch in (first.body, first.orelse) if any(lines & _lines_of(node) for node in branch)]
        if len(inner) == 1:
            return _span(inner[0], lines)
    return frozenset(node.lineno for node in block[holding[0] : holding[-1] + 1])


def _lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


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
    nodes = (node for statement in statements for node in ast.walk(statement))
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.lineno in lines]
    of_submodules = [node for node in calls if ast.unparse(node.func).startswith("self.")]
    for node in of_submodules or calls:  # a submodule can be called by another name
        yield node.lineno, ast.unparse(node)


def _no_form(file: str, line: int, saw: str) -> Refused:
    return Refused(
        RefusalKind.NO_FORM,
        at=Location(file, line),
        name="forward",
        saw=saw,
        do="serve this family unsplit: the FFN's work must stand in assignments of its own, outside loops",
    )
