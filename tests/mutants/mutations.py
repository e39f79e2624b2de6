"""Small semantic edits of upstream source, at every place of a layer where they apply.

An edit replaces the text of one syntax node and leaves all other lines where they are. Edits that cannot change what a
layer does (renaming a local variable, swapping independent statements) are not made.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Mutant:
    """An edited source file."""

    what: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class _Edit:
    what: str
    node: ast.stmt | ast.expr
    new: str


def mutants_of(text: str, layer: str) -> Iterator[Mutant]:
    """All mutants of the layer's forward, and of what its `__init__` builds, in source order, without duplicates."""
    body = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == layer).body
    methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    seen = {text}
    for edit in [*_forward_edits(methods["forward"]), *_init_edits(methods["__init__"])]:
        edited = _replaced(text, edit.node, edit.new)
        if edited not in seen:
            seen.add(edited)
            yield Mutant(edit.what, edit.node.lineno, edited)


def _forward_edits(forward: ast.FunctionDef) -> Iterator[_Edit]:
    names = [argument.arg for argument in forward.args.args[1:]]
    last = forward.args.args[-1]
    end = forward.args.defaults[-1] if forward.args.defaults else last.annotation
    if end is not None:
        yield _Edit("add a parameter", end, f"{ast.unparse(end)}, new_flag=None")
    yield from _moves(forward.body)
    same: set[str] = set()
    for statement in _statements(forward.body):
        yield from _statement_edits(statement, names)
        for node in ast.walk(statement) if not isinstance(statement, ast.If) else ast.walk(statement.test):
            if isinstance(node, ast.Name) and node.id in same:
                continue  # right after `a = b` either name means the same tensor
            if isinstance(node, ast.expr):
                yield from _expression_edits(node, names)
        same = _alias(statement)


def _moves(body: list[ast.stmt]) -> Iterator[_Edit]:
    """Each statement behind the next one, where they share a name: the norm behind the FFN, for instance."""
    for one, other in pairwise(body):
        if isinstance(other, ast.Return) or not _stored(one) & (_stored(other) | _loaded(other)):
            continue
        both = copy.copy(one)
        both.end_lineno, both.end_col_offset = other.end_lineno, other.end_col_offset
        swapped = f"{ast.unparse(other)}\n{ast.unparse(one)}".replace("\n", "\n" + " " * one.col_offset)
        yield _Edit("move a statement", both, swapped)


def _stored(node: ast.stmt) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}


def _loaded(node: ast.stmt) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}


def _alias(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=source)):
            return {target, source}
    return set()


def _init_edits(init: ast.FunctionDef) -> Iterator[_Edit]:
    """Edits of what is passed to submodules, and of what forward reads from the configuration."""
    for statement in _statements(init.body):
        if not isinstance(statement, ast.Assign) or not _is_self_attribute(statement.targets[0]):
            continue
        yield _Edit("drop a statement", statement, "pass")
        for node in ast.walk(statement.value):
            if isinstance(node, ast.Call):
                yield from _call_edits(node, [])
            if isinstance(node, ast.Constant) and not isinstance(node.value, str):
                yield _Edit("change a default", node, _other_constant(node.value))


def _statement_edits(statement: ast.stmt, names: list[str]) -> Iterator[_Edit]:
    if isinstance(statement, ast.If):
        yield _Edit("negate a condition", statement.test, f"not ({ast.unparse(statement.test)})")
        yield _Edit("always take a branch", statement.test, "True")
        return
    source = ast.unparse(statement)
    indent = " " * statement.col_offset
    if isinstance(statement, ast.Return):
        yield _Edit("return a third value", statement, f"return (*({ast.unparse(statement.value)}), {names[0]})")
        yield _Edit("swap what is returned", statement, f"return tuple(reversed({ast.unparse(statement.value)}))")
        return
    yield _Edit("drop a statement", statement, "pass")
    if not isinstance(statement, ast.Assign | ast.AugAssign):
        return
    target = _first_name(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
    for after in ("un-normed + 1", "un-reduced"):
        change = f"{target} = {target} + 1" if after == "un-normed + 1" else f"{target} = all_reduce({target})"
        if target in names:
            yield _Edit("add a branch on a new flag", statement, f"{source}\n{indent}if self.new_flag: {change}")
            yield _Edit("add work", statement, f"{source}\n{indent}{change}")
    # A tensor method done twice gives the same tensor; a submodule, or an operator in place, is done twice.
    if any(isinstance(node, ast.Call) and _is_self_attribute(node.func) for node in ast.walk(statement)):
        yield _Edit("call twice", statement, f"{source}; {source}")
    if isinstance(statement, ast.AugAssign):
        operator = _OPERATORS[type(statement.op)]
        plain = f"{ast.unparse(statement.target)} = {ast.unparse(statement.target)} {operator} "
        yield _Edit("not in place", statement, f"{plain}{ast.unparse(statement.value)}")
        yield _Edit("another operator", statement, source.replace("*=", "/=").replace("+=", "-="))


_OPERATORS = {ast.Mult: "*", ast.Add: "+", ast.Div: "/", ast.Sub: "-"}
_COMPARISONS = {"==": "!=", "!=": "==", " is not ": " is ", " is ": " is not ", ">=": "<"}


def _expression_edits(node: ast.expr, names: list[str]) -> Iterator[_Edit]:
    if isinstance(node, ast.Call):
        yield from _call_edits(node, names)
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield _Edit("another connective", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
    elif isinstance(node, ast.Compare):
        source = ast.unparse(node)
        word = next((word for word in _COMPARISONS if word in source), None)
        if word:
            yield _Edit("the opposite comparison", node, source.replace(word, _COMPARISONS[word]))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.Add | ast.Mod):
        yield _Edit("another operator", node, f"({ast.unparse(ast.BinOp(node.left, ast.Sub(), node.right))})")
    elif isinstance(node, ast.Constant) and not isinstance(node.value, str | None):
        yield _Edit("another constant", node, _other_constant(node.value))
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        yield from (_Edit("another variable", node, name) for name in names[:3] if name != node.id)


def _call_edits(call: ast.Call, names: list[str]) -> Iterator[_Edit]:
    """Of a call's keywords, arguments and result; `names` are the tensors at hand."""
    for position, word in enumerate(call.keywords):
        if word.arg is None:
            continue
        renamed, dropped, other = (copy.deepcopy(call) for _ in range(3))
        renamed.keywords[position].arg = f"{word.arg}_renamed"
        del dropped.keywords[position]
        other.keywords[position].value = ast.Name("None")
        for what, new in (("rename a keyword", renamed), ("drop a keyword", dropped), ("another value", other)):
            yield _Edit(what, call, ast.unparse(new))
    if len(call.args) >= 2 and not any(isinstance(argument, ast.Starred) for argument in call.args):
        swapped = copy.deepcopy(call)
        swapped.args[0], swapped.args[1] = swapped.args[1], swapped.args[0]
        yield _Edit("swap two arguments", call, ast.unparse(swapped))
    if names and _is_self_attribute(call.func):
        extra = copy.deepcopy(call)
        extra.args.append(ast.Name(names[0]))
        yield _Edit("add an argument", call, ast.unparse(extra))
        keyword = copy.deepcopy(call)
        keyword.keywords.append(ast.keyword("new_flag", ast.Constant(True)))
        yield _Edit("add a keyword", call, ast.unparse(keyword))
        yield _Edit("scale a result", call, f"self.scaled({ast.unparse(call)})")
    if not names:
        unreduced = copy.deepcopy(call)
        unreduced.keywords = [word for word in unreduced.keywords if word.arg != "reduce_results"]
        unreduced.keywords.append(ast.keyword("reduce_results", ast.Constant(False)))
        yield _Edit("un-reduce the output", call, ast.unparse(unreduced))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)


def _is_self_attribute(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _first_name(node: ast.expr) -> str:
    return next((inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)), "")


def _other_constant(value: object) -> str:
    return repr(not value) if isinstance(value, bool) else repr(value + 1 if isinstance(value, int | float) else 1)


def _replaced(text: str, node: ast.stmt | ast.expr, new: str) -> str:
    lines = text.splitlines(keepends=True)
    assert node.end_lineno is not None  # nodes that were parsed have an end
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    padding = "\n" * (node.end_lineno - node.lineno - new.count("\n"))
    return "".join([*lines[: node.lineno - 1], before, new, after, *lines[node.end_lineno :], padding])
