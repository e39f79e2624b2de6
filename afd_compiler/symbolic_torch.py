"""Lets torch take symbolic values where it asks no tensor: sizes of new tensors, and what stands for a submodule."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from afd_compiler.tracer import LayerTracer

_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn")
"""Functions of torch that take no tensor, and so never ask one."""
_RUNNING: ContextVar[LayerTracer | None] = ContextVar("running", default=None)


@contextmanager
def recorded_by(tracer: LayerTracer) -> Iterator[None]:
    """Let torch's own functions and modules take symbolic sizes, and values in the place of submodules."""
    before = _RUNNING.set(tracer)
    try:
        with symbolic_torch():
            yield
    finally:
        _RUNNING.reset(before)


@contextmanager
def symbolic_torch() -> Iterator[None]:
    """Prepare torch for `recorded_by`, once for many traces: to patch nn.Module takes longer than a short trace."""
    if torch.nn.Module.__setattr__ is _set_member:
        yield
        return
    with ExitStack() as patches:
        for name in _FACTORIES:
            patches.enter_context(patch.object(torch, name, _Recorded(getattr(torch, name))))
        for name in ("Stream", "Event"):
            patches.enter_context(patch.object(torch.cuda, name, _Recorded(getattr(torch.cuda, name), always=True)))
        patches.enter_context(patch.object(torch, "compile", _uncompiled))
        patches.enter_context(patch.object(torch.nn.Module, "__setattr__", _set_member))
        patches.enter_context(patch.object(torch.nn.Module, "to", _to))
        patches.enter_context(patch.object(torch.nn.Module, "parameters", _some_parameters))
        for module in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
            patches.enter_context(patch.object(module, "reset_parameters", _unless_traced(module.reset_parameters)))
        patches.enter_context(patch.object(torch.nn.Dropout, "__init__", _dropout))
        yield


class _Recorded:
    """A function, or a class in annotations too, that is recorded when a traced value is passed to it."""

    def __init__(self, function: Callable[..., Any], *, always: bool = False) -> None:
        self._function, self._always = function, always

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = _RUNNING.get()
        if tracer and (self._always or any(tracer.is_symbolic(leaf) for leaf in tree_leaves((args, kwargs)))):
            return tracer.create_proxy("call_function", self._function, args, kwargs)
        return self._function(*args, **kwargs)

    def __or__(self, _: object) -> "_Recorded":
        return self

    __ror__ = __or__


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """`torch.compile` as the decorator that it is for traced source, without its compiler, which loads for seconds."""
    return (lambda decorated: decorated) if function is None else function


_to_natively = torch.nn.Module.to


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    return self if _RUNNING.get() else _to_natively(self, *args, **kwargs)


_parameters = torch.nn.Module.parameters


def _some_parameters(self: torch.nn.Module, recurse: bool = True) -> Iterator[Any]:
    """A model that is traced always has some, though its submodules are not entered."""
    tracer = _RUNNING.get()
    yield from list(_parameters(self, recurse)) or ([tracer.input("parameter")] if tracer else [])


def _unless_traced(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A method that symbolic sizes would stop."""
    return lambda self: None if _RUNNING.get() else method(self)


_dropout_natively = torch.nn.Dropout.__init__


def _dropout(self: torch.nn.Dropout, p: Any = 0.5, inplace: Any = False) -> None:
    """nn.Dropout's, without its question whether the probability is one."""
    if _RUNNING.get() is None:
        _dropout_natively(self, p, inplace)
        return
    torch.nn.Module.__init__(self)
    self.p, self.inplace = p, inplace


_set_natively = torch.nn.Module.__setattr__


def _set_member(self: torch.nn.Module, name: str, value: Any) -> None:
    """nn.Module's, but for a symbolic value in the place of a submodule: a head that becomes the embedding, say."""
    if isinstance(value, fx.Proxy):
        vars(self).get("_modules", {}).pop(name, None)
    _set_natively(self, name, value)
