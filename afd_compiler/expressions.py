"""Traced values as expressions in upstream's own terms: names of decisions, and what arguments are compared by."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from afd_compiler.sandbox import Leaf, Stub

_SYMBOLS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "is_": "is", "is_not": "is not",
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
}  # fmt: skip


class Expressions:
    """Mixed into the tracer, which knows the layer's names for its tensors."""

    _texts: dict[fx.Node, str]

    def tensor_name(self, tensor: torch.Tensor) -> str:
        raise NotImplementedError

    def text(self, node: fx.Node) -> str:
        """The expression that a node stands for, in upstream's own terms."""
        if node not in self._texts:
            self._texts[node] = self._render(node.target, node)
        return self._texts[node]

    def arguments_text(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        return ", ".join(self.argument_texts(args, kwargs))

    def argument_texts(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
        yield from (self.value_text(value) for value in args)
        yield from (f"{name}={self.value_text(value)}" for name, value in kwargs.items())

    def value_text(self, value: Any) -> str:
        if isinstance(value, fx.Proxy):
            return self.text(value.node)
        if isinstance(value, fx.Node):
            return self.text(value)
        if isinstance(value, tuple | list):
            inner = ", ".join(self.value_text(item) for item in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if isinstance(value, dict):
            return "{" + ", ".join(self.value_text(key) for key in value) + "}"
        if isinstance(value, slice):
            return ":".join("" if part is None else self.value_text(part) for part in (value.start, value.stop))
        if isinstance(value, torch.Tensor):
            return f"self.{self.tensor_name(value)}"
        if isinstance(value, Leaf | torch.nn.Module):
            return type(value).__name__
        if isinstance(value, MethodType):
            return f"self.{self.value_text(value.__self__)}.{value.__name__}"
        if isinstance(value, type | FunctionType):
            return value.__qualname__
        return repr(value)

    def _render(self, target: Any, node: fx.Node) -> str:
        args = node.args
        if node.op == "placeholder":
            return str(target)
        if node.op == "get_attr":
            return f"self.{target}"
        if node.op == "call_module":
            return f"self.{target}({self.arguments_text(args, node.kwargs)})"
        if node.op == "call_method":
            return f"{self.value_text(args[0])}.{target}({self.arguments_text(args[1:], node.kwargs)})"
        if target is getattr:
            return f"{self.value_text(args[0])}.{args[1]}"
        if target is operator.getitem:
            return f"{self.value_text(args[0])}[{self.value_text(args[1])}]"
        name = getattr(target, "__name__", str(target))
        if name in _SYMBOLS and len(args) == 2:
            return f"{self.value_text(args[0])} {_SYMBOLS[name]} {self.value_text(args[1])}"
        return f"{target_name(target)}({self.arguments_text(args, node.kwargs)})"


def target_name(target: Any) -> str:
    """A call target as a person would write it."""
    if isinstance(target, str):
        return target
    if isinstance(target, Stub):
        return str(target.qualified_name)
    return f"{getattr(target, '__module__', '') or ''}.{getattr(target, '__name__', target)}".lstrip(".")
