"""What stands for everything unknown in a traced layer: a torch.fx proxy that keeps in-place operators in place."""

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from afd_compiler.tracer import LayerTracer

_UNPACK = dis.opmap["UNPACK_SEQUENCE"]
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "iand", "ior", "imatmul", "ipow", "ifloordiv", "imod")
IN_PLACE_OPERATORS = frozenset(getattr(operator, name) for name in _IN_PLACE) | {operator.setitem}


class Symbolic(fx.Proxy):
    """A value known only by how it came about; what it is asked, its tracer answers."""

    tracer: "LayerTracer"

    def __init__(self, node: fx.Node, tracer: "LayerTracer") -> None:
        vars(self).update(node=node, tracer=tracer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.tracer.attribute_of(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        node = self.node
        if node.target is getattr:
            owner, name = node.all_input_nodes[0], str(node.args[1])
            return self.tracer.create_proxy("call_method", name, (fx.Proxy(owner, self.tracer), *args), kwargs)
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Unpacking into names. fx finds out the same by disassembling the whole function each time."""
        frame = sys._getframe(1)
        operation, count = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
        if operation == _UNPACK:
            return iter([operator.getitem(self, position) for position in range(count)])
        return iter([self.tracer.any_item(self)])

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.tracer.set_inside(self.node, name, value):
            super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __enter__(self) -> Any:
        return self.tracer.create_proxy("call_method", "__enter__", (self,), {})

    def __exit__(self, *_: object) -> None:
        self.tracer.create_proxy("call_method", "__exit__", (self,), {})

    def __len__(self) -> int:
        raise TypeError("the length of a traced value is not known")

    def __str__(self) -> str:
        return self.tracer.spelled(self)

    def __format__(self, _: str) -> str:
        return str(self)

    def __deepcopy__(self, _: object) -> Any:
        return self.tracer.create_proxy("call_function", deepcopy, (self,), {})

    def __hash__(self) -> int:
        return id(self)


def _in_place(name: str) -> Callable[[Symbolic, Any], Any]:
    def method(self: Symbolic, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in _IN_PLACE:
    setattr(Symbolic, f"__{_name}__", _in_place(_name))
