"""Takes upstream's forward apart with libcst: the FFN's statements alone, or all but those, as upstream wrote them."""

import ast
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import libcst
from libcst.metadata import MetadataWrapper, PositionProvider

from afd_compiler.region import Region
from afd_compiler.symbols import ModuleIndex


def kept_statements(function: ast.FunctionDef, region: Region, index: ModuleIndex, alias: str) -> str:
    """Text of the region's statements, global names spelled `<alias>.…`, comments left out."""
    method = _transformed(function, index, lambda offset, names: _Keep(region.kept, offset, names, alias))
    return libcst.Module(body=_statements(method.body.body)).code


def outlined(
    function: ast.FunctionDef,
    span: frozenset[int],
    index: ModuleIndex,
    alias: str,
    instead: str,
    classes: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Text of the method with the statement `instead` in place of the statements on `span`, and other names for
    `classes`."""
    method = _transformed(function, index, lambda offset, names: _Outline(span, offset, names, alias, instead, classes))
    return libcst.Module(body=[method]).code


def _transformed(
    function: ast.FunctionDef, index: ModuleIndex, make: Callable[[int, frozenset[str]], libcst.CSTTransformer]
) -> libcst.FunctionDef:
    lines = index.text.splitlines()[function.lineno - 1 : function.end_lineno]
    wrapper = MetadataWrapper(libcst.parse_module(textwrap.dedent("\n".join(lines)) + "\n"), unsafe_skip_copy=True)
    (method,) = wrapper.visit(make(function.lineno - 1, index.names - {"torch"})).body
    assert isinstance(method, libcst.FunctionDef)
    return method


class _Qualified(libcst.CSTTransformer):
    """Spells global names `<alias>.…` and drops comments."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, offset: int, global_names: frozenset[str], alias: str) -> None:
        super().__init__()
        self.offset, self.global_names, self.alias = offset, global_names, alias

    def on_leave(self, original_node: libcst.CSTNodeT, updated_node: libcst.CSTNodeT) -> Any:
        new: Any = super().on_leave(original_node, updated_node)
        is_statement = isinstance(original_node, libcst.SimpleStatementLine | libcst.BaseCompoundStatement)
        if not is_statement or isinstance(original_node, libcst.FunctionDef):
            return new
        start = self.get_metadata(PositionProvider, original_node).start.line + self.offset
        return self.statement(start, new.with_changes(leading_lines=()))

    def statement(self, line: int, node: Any) -> Any:
        raise NotImplementedError

    def leave_Name(self, original_node: libcst.Name, updated_node: libcst.Name) -> libcst.BaseExpression:
        if updated_node.value in self.global_names:
            return libcst.Attribute(libcst.Name(self.alias), updated_node)
        return updated_node

    def leave_Attribute(self, original_node: libcst.Attribute, updated_node: libcst.Attribute) -> libcst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: libcst.Arg, updated_node: libcst.Arg) -> libcst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_TrailingWhitespace(
        self, original_node: libcst.TrailingWhitespace, updated_node: libcst.TrailingWhitespace
    ) -> libcst.TrailingWhitespace:
        return updated_node.with_changes(comment=None)

    def leave_IndentedBlock(
        self, original_node: libcst.IndentedBlock, updated_node: libcst.IndentedBlock
    ) -> libcst.IndentedBlock:
        return updated_node.with_changes(footer=())


class _Keep(_Qualified):
    def __init__(self, kept: frozenset[int], offset: int, global_names: frozenset[str], alias: str) -> None:
        super().__init__(offset, global_names, alias)
        self.kept = kept

    def statement(self, line: int, node: Any) -> Any:
        return node if line in self.kept else libcst.RemoveFromParent()

    def leave_If(self, original_node: libcst.If, updated_node: libcst.If) -> libcst.If:
        """A branch that holds nothing of the FFN's becomes `pass`, or goes where it is the last."""
        body = updated_node.body if _statements(updated_node.body.body) else _PASS
        orelse = updated_node.orelse
        if isinstance(orelse, libcst.Else) and not _statements(orelse.body.body):
            orelse = None
        return updated_node.with_changes(body=body, orelse=orelse)


class _Outline(_Qualified):
    def __init__(
        self,
        span: frozenset[int],
        offset: int,
        global_names: frozenset[str],
        alias: str,
        instead: str,
        classes: Mapping[str, str],
    ) -> None:
        super().__init__(offset, global_names, alias)
        self.span, self.instead, self.classes = span, libcst.parse_statement(instead), classes

    def statement(self, line: int, node: Any) -> Any:
        if line not in self.span:
            return node
        return self.instead if line == min(self.span) else libcst.RemoveFromParent()

    def leave_Name(self, original_node: libcst.Name, updated_node: libcst.Name) -> libcst.BaseExpression:
        if updated_node.value in self.classes:
            return updated_node.with_changes(value=self.classes[updated_node.value])
        return super().leave_Name(original_node, updated_node)

    def leave_Param(self, original_node: libcst.Param, updated_node: libcst.Param) -> libcst.Param:
        return updated_node.with_changes(annotation=None, name=original_node.name)

    def leave_FunctionDef(
        self, original_node: libcst.FunctionDef, updated_node: libcst.FunctionDef
    ) -> libcst.FunctionDef:
        return updated_node.with_changes(returns=None, leading_lines=())


_PASS = libcst.IndentedBlock([libcst.SimpleStatementLine([libcst.Pass()])])


def _statements(body: Sequence[libcst.CSTNode]) -> list[libcst.SimpleStatementLine | libcst.BaseCompoundStatement]:
    kinds = (libcst.SimpleStatementLine, libcst.BaseCompoundStatement)
    return [node for node in body if isinstance(node, kinds)]
