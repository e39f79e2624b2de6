"""Cuts the FFN's statements out of upstream's forward, with libcst, so that they stay as upstream wrote them."""

import ast
import textwrap
from collections.abc import Sequence
from typing import Any

import libcst
from libcst.metadata import MetadataWrapper, PositionProvider

from afd_compiler.region import Region
from afd_compiler.symbols import ModuleIndex


def kept_statements(function: ast.FunctionDef, region: Region, index: ModuleIndex) -> str:
    """Text of the region's statements, global names spelled `upstream.…`, comments left out."""
    lines = index.text.splitlines()[function.lineno - 1 : function.end_lineno]
    wrapper = MetadataWrapper(libcst.parse_module(textwrap.dedent("\n".join(lines)) + "\n"))
    module = wrapper.visit(_Keep(region.kept, function.lineno - 1, index.names - {"torch"}))
    (method,) = module.body
    assert isinstance(method, libcst.FunctionDef)
    return libcst.Module(body=_statements(method.body.body)).code


class _Keep(libcst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, kept: frozenset[int], offset: int, global_names: frozenset[str]) -> None:
        super().__init__()
        self.kept, self.offset, self.global_names = kept, offset, global_names

    def on_leave(self, original_node: libcst.CSTNodeT, updated_node: libcst.CSTNodeT) -> Any:
        new: Any = super().on_leave(original_node, updated_node)
        is_statement = isinstance(original_node, libcst.SimpleStatementLine | libcst.BaseCompoundStatement)
        if not is_statement or isinstance(original_node, libcst.FunctionDef):
            return new
        start = self.get_metadata(PositionProvider, original_node).start.line + self.offset
        if start not in self.kept:
            return libcst.RemoveFromParent()
        return new.with_changes(leading_lines=())

    def leave_If(self, original_node: libcst.If, updated_node: libcst.If) -> libcst.If:
        """A branch that holds nothing of the FFN's becomes `pass`, or goes where it is the last."""
        body = updated_node.body if _statements(updated_node.body.body) else _PASS
        orelse = updated_node.orelse
        if isinstance(orelse, libcst.Else) and not _statements(orelse.body.body):
            orelse = None
        return updated_node.with_changes(body=body, orelse=orelse)

    def leave_Name(self, original_node: libcst.Name, updated_node: libcst.Name) -> libcst.BaseExpression:
        if updated_node.value in self.global_names:
            return libcst.Attribute(libcst.Name("upstream"), updated_node)
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


_PASS = libcst.IndentedBlock([libcst.SimpleStatementLine([libcst.Pass()])])


def _statements(body: Sequence[libcst.CSTNode]) -> list[libcst.SimpleStatementLine | libcst.BaseCompoundStatement]:
    kinds = (libcst.SimpleStatementLine, libcst.BaseCompoundStatement)
    return [node for node in body if isinstance(node, kinds)]
