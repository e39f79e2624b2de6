"""Lets torch take symbolic values where it asks no tensor: sizes of new tensors, and what stands for a submodule."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from afd_compiler.tracer import LayerTracer

_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn")
"""Functions of torch that take no tensor, and so never ask one."""


@contextmanager
def symbolic_torch(tracer: LayerTracer) -> Iterator[None]:
    """Let torch's own functions and modules take symbolic sizes, and values in the place of submodules."""

    def recorded(function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if always or any(tracer.is_symbolic(leaf) for leaf in tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return record

    def some_parameters(self: torch.nn.Module, recurse: bool = True) -> Iterator[Any]:
        """A model always has some, though its submodules are not entered."""
        yield from list(_parameters(self, recurse)) or [tracer.input("parameter")]

    with ExitStack() as patches:
        for name in _FACTORIES:
            patches.enter_context(patch.object(torch, name, recorded(getattr(torch, name))))
        for module in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
            patches.enter_context(patch.object(module, "reset_parameters", lambda _: None))  # of symbolic sizes
        patches.enter_context(patch.object(torch.nn.Dropout, "__init__", _dropout))
        for name in ("Stream", "Event"):
            patches.enter_context(patch.object(torch.cuda, name, recorded(getattr(torch.cuda, name), always=True)))
        patches.enter_context(patch.object(torch.nn.Module, "__setattr__", _set_member))
        patches.enter_context(patch.object(torch.nn.Module, "to", lambda self, *_, **__: self))
        patches.enter_context(patch.object(torch.nn.Module, "parameters", some_parameters))
        yield


def _dropout(self: torch.nn.Dropout, p: Any = 0.5, inplace: Any = False) -> None:
    """nn.Dropout's, without its question whether the probability is one."""
    torch.nn.Module.__init__(self)
    self.p, self.inplace = p, inplace


_set_natively = torch.nn.Module.__setattr__
_parameters = torch.nn.Module.parameters


def _set_member(self: torch.nn.Module, name: str, value: Any) -> None:
    """nn.Module's, but for a symbolic value in the place of a submodule: a head that becomes the embedding, say."""
    if isinstance(value, fx.Proxy):
        vars(self).get("_modules", {}).pop(name, None)
    _set_natively(self, name, value)
