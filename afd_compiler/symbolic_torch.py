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
            patches.enter_context(patch.object(torch, name, _recorded(getattr(torch, name))))
        for name in ("Stream", "Event"):
            patches.enter_context(patch.object(torch.cuda, name, _recorded(getattr(torch.cuda, name), always=True)))
        patches.enter_context(patch.object(torch, "compile", _uncompiled))
        patches.enter_context(patch.object(torch.nn.Module, "__setattr__", _set_member))
        patches.enter_context(patch.object(torch.nn.Module, "to", _to))
        yield


def _recorded(function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        tracer = _RUNNING.get()
        if tracer and (always or any(tracer.is_symbolic(leaf) for leaf in tree_leaves((args, kwargs)))):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """`torch.compile` as the decorator that it is for traced source, without its compiler, which loads for seconds."""
    return (lambda decorated: decorated) if function is None else function


_to_natively = torch.nn.Module.to


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    return self if _RUNNING.get() else _to_natively(self, *args, **kwargs)


_set_natively = torch.nn.Module.__setattr__


def _set_member(self: torch.nn.Module, name: str, value: Any) -> None:
    """nn.Module's, but for a symbolic value in the place of a submodule: a head that becomes the embedding, say."""
    if isinstance(value, fx.Proxy):
        vars(self).get("_modules", {}).pop(name, None)
    _set_natively(self, name, value)
