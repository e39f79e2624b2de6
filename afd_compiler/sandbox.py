"""Runs upstream source without vLLM: the module itself is executed, whatever it imports from elsewhere is a stub.

Nothing leaks: imports are answered by a private `__import__`, so `sys.modules` and an installed vLLM stay untouched.
Questions that Python answers without asking the object (`is`, `isinstance`, `len(…)`, …) are rewritten into calls, so
that symbolic values can answer them too; line numbers stay those of the file.
"""

import ast
import builtins
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.symbols import Symbol, SymbolKind, Symbols, platform_answer

if TYPE_CHECKING:
    from afd_compiler.tracer import LayerTracer

REAL_IMPORTS = frozenset(sys.stdlib_module_names) | {"torch", "typing_extensions"}
"""Top-level packages that traced source gets for real."""
HOOK = "__afd_ask__"
SET = "__afd_set__"
ASKED_BUILTINS = frozenset({"int", "float", "len", "range", "isinstance", "hasattr", "getattr"})
"""Rewritten into questions. None of them tells what a tensor holds, but for `int` and `float`."""


class Stub:
    """Any name that executed source takes from outside the sandbox: callable, subclassable, usable in annotations."""

    def __init__(self, sandbox: "Sandbox", name: str) -> None:
        self.__dict__.update(sandbox=sandbox, qualified_name=name, __name__=name.rpartition(".")[2], __module__="stub")

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__version__":
            raise AttributeError(attribute)
        return self.sandbox.name(f"{self.qualified_name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.sandbox.tracer is not None:
            if model := self.sandbox.understood.get(self.qualified_name):
                return model(*args, **kwargs)
            if self.sandbox.is_class(self.qualified_name):
                return self.sandbox.class_of(self)(*args, **kwargs)
            return self.sandbox.tracer.call_function(self, args, kwargs)
        if len(args) == 1 and not kwargs and (isinstance(args[0], type) or callable(args[0])):
            return args[0]  # a decorator
        return self.sandbox.name(f"{self.qualified_name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.sandbox.class_of(self),)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.sandbox.class_of(self))

    def __or__(self, other: object) -> "Stub":
        return self

    __ror__ = __or__

    def __ge__(self, other: object) -> "Stub":
        return self  # of a version: a question like any other

    __gt__ = __le__ = __lt__ = __ge__

    def __getitem__(self, item: object) -> "Stub":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter([self.sandbox.tracer.any_item(self)] if self.sandbox.tracer else [])

    def __bool__(self) -> bool:
        return bool(self.sandbox.truth_of(self))

    def __repr__(self) -> str:
        return str(self.qualified_name)


class Leaf:
    """Base of stubbed classes: takes any arguments, and is called without being entered."""

    sandbox: "Sandbox"

    def __init_subclass__(cls, **_: Any) -> None:
        # A class that mixes a stub in behind nn.Module would never ask the stub.
        cls.__getattr__ = Leaf.__getattr__  # type: ignore[method-assign]

    def __class_getitem__(cls, _: object) -> type:
        return cls  # a generic class, in an annotation or as a base

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self, torch.nn.Module):
            torch.nn.Module.__init__(self)
        self.sandbox.built(self, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.sandbox.called(self, args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        for table in ("_modules", "_parameters", "_buffers"):
            if attribute in vars(self).get(table, ()):
                return vars(self)[table][attribute]
        return self.sandbox.attribute(self, attribute)


class Sandbox:
    """Some modules of a source tree, executed; give it a tracer, and calls become graph nodes."""

    def __init__(
        self,
        symbols: Symbols,
        opened: Iterable[str],
        understood: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self.symbols = symbols
        self.opened = frozenset(opened)
        """Modules of the source tree that are executed, when they are first asked for; all others are stubs."""
        self.understood = understood
        """Functions from outside that are executed by a model of theirs instead of recorded."""
        self.tracer: LayerTracer | None = None
        self._modules: dict[str, ModuleType] = {}
        self._stubs: dict[str, Stub] = {}
        self._classes: dict[str, type] = {}
        self._files: set[str] = set()
        self._leaves: set[type] = set()
        self._math = self._recorded_math()
        self._builtins = {**vars(builtins), "__import__": self._import}

    def execute(self, name: str, file: str, text: str) -> ModuleType:
        """Run source text as the module `name`; later imports of that name get it. `file` is shown in locations."""
        module = ModuleType(name)
        module.__dict__.update(__builtins__=self._builtins, __file__=file, __package__=name.rpartition(".")[0])
        module.__dict__.update({HOOK: self._ask, SET: OrderedSet})
        self._files.add(file)
        self._modules[name] = module
        try:
            exec(_code(file, text), module.__dict__)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                RefusalKind.SOURCE_FAILED,
                at=self.where(error) or Location(file, 1),
                name=name,
                saw=f"{type(error).__name__} while executing the source under stubs: {error}",
                do="report this release to afd-compiler: its stubs do not cover what the module does on import",
            ) from error
        return module

    def module(self, name: str) -> ModuleType:
        """An opened module, executed."""
        if name not in self._modules:
            path = self.symbols.tree.path_of(name)
            assert path is not None  # a class was found in it
            self.execute(name, self.symbols.tree.relative(path), self.symbols.tree.text(name))
        return self._modules[name]

    def loaded(self, name: str) -> Any:
        """A module that was executed, or None."""
        return self._modules.get(name)

    def cls(self, symbol: Symbol) -> type:
        """A class of an opened module."""
        found: type = getattr(self.module(symbol.module), symbol.name)
        return found

    def make_leaves(self, entered: Iterable[Symbol]) -> None:
        """Let the opened modules' classes be called without being entered, but for those that are to be traced."""
        traced = {ancestor for symbol in entered for ancestor in self.cls(symbol).__mro__}
        for name in sorted(self.opened):
            self._make_leaves(self.module(name), traced)

    def _make_leaves(self, module: ModuleType, entered: set[type]) -> None:
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__ and value not in entered:
                # The class is the sandbox's own copy; its name still answers isinstance.
                members = {"__init__": Leaf.__init__, "__call__": Leaf.__call__, "__getattr__": Leaf.__getattr__}
                for name, member in {**members, "sandbox": self}.items():
                    setattr(value, name, member)
                self._leaves.add(value)

    def name(self, qualified: str) -> Any:
        """What an imported name is: an executed module, a thing in one, or a stub."""
        if qualified in self._modules or qualified in self.opened:
            return self.module(qualified)
        symbol = self.symbols.resolve(*qualified.rpartition(".")[::2])
        if symbol.module in self.opened and symbol.kind is not SymbolKind.UNKNOWN:
            return getattr(self.module(symbol.module), symbol.name)
        if qualified not in self._stubs:
            self._stubs[qualified] = Stub(self, qualified)
        return self._stubs[qualified]

    def class_of(self, stub: Stub) -> type:
        """The class behind a stub that is subclassed or instantiated."""
        name = stub.qualified_name
        if name not in self._classes:
            module, _, own = name.rpartition(".")
            symbol = self.symbols.resolve(module, own)
            members = {"sandbox": self, "symbol": symbol, "__module__": "stub", "__qualname__": own}
            is_module = self.symbols.is_module_class(symbol)
            bases = (Leaf, torch.nn.Module) if is_module else (Leaf,)
            self._classes[name] = type(own, bases, members)
            self._leaves.add(self._classes[name])
        return self._classes[name]

    def leaf_class(self, name: str) -> type:
        """A class of modules that stands in no source: called without being entered."""
        if name not in self._classes:
            self._classes[name] = type(name, (Leaf, torch.nn.Module), {"sandbox": self, "__module__": "stub"})
            self._leaves.add(self._classes[name])
        return self._classes[name]

    def is_leaf(self, module: torch.nn.Module) -> bool:
        """Whether a module is one that is called without being entered, and not made of such."""
        return type(module) in self._leaves

    def is_class(self, qualified: str) -> bool:
        module, _, name = qualified.rpartition(".")
        symbol = self.symbols.resolve(module, name)
        return symbol.kind is SymbolKind.CLASS or self.symbols.is_module_class(symbol)

    def truth_of(self, stub: Stub) -> bool:
        """Truth of a stub: by platform where it asks for one; a fork under a tracer; absent at import time."""
        question = stub.qualified_name.rpartition(".")[2].removesuffix("()")
        if "current_platform." in stub.qualified_name:
            return platform_answer(question, self.symbols.platform)
        return self.tracer.decide(stub.qualified_name) if self.tracer else False

    def built(self, leaf: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.tracer is not None:
            self.tracer.record_construction(leaf, args, kwargs)

    def called(self, leaf: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        forward = getattr(type(leaf), "forward", None)
        if self.tracer is None:
            return self.name(f"{type(leaf).__name__}()")
        if forward and self.tracer.enters(leaf):
            return self.tracer.name_exchange(leaf, args, kwargs, forward(leaf, *args, **kwargs))
        return self.tracer.call_leaf(leaf, args, kwargs)

    def attribute(self, leaf: Any, attribute: str) -> Any:
        if attribute.startswith("__") or self.tracer is None or not self._may_have(leaf, attribute):
            raise AttributeError(f"{type(leaf).__name__!r} object has no attribute {attribute!r}")
        return self.tracer.leaf_attribute(leaf, attribute)

    def _may_have(self, leaf: Any, attribute: str) -> bool:
        """A leaf can have any attribute; a class whose code is executed has what it sets, and what its stubs define."""
        if type(leaf) in self._leaves:
            return True
        stubs = (vars(base)["symbol"] for base in type(leaf).__mro__ if "symbol" in vars(base))
        return any(self.symbols.defines(symbol, attribute) for symbol in stubs)

    def _recorded_math(self) -> ModuleType:
        """`math`, whose functions can be asked for symbolic values too."""
        module = ModuleType("math")
        for name, value in vars(math).items():
            module.__dict__[name] = partial(self._calculate, value) if callable(value) else value
        return module

    def _calculate(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.tracer is not None and any(self.tracer.is_symbolic(argument) for argument in args):
            return self.tracer.create_proxy("call_function", function, args, {})
        return function(*args)

    def here(self) -> Location | None:
        """The innermost executed source line on the running stack."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                return Location(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def where(self, error: BaseException) -> Location | None:
        """The innermost executed source line that an exception passed."""
        found = None
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename in self._files:
                found = Location(step.tb_frame.f_code.co_filename, step.tb_lineno)
            step = step.tb_next
        return found

    def raised_by_source(self, error: BaseException) -> bool:
        """Whether upstream's own code raised this, as opposed to something that it called."""
        step = error.__traceback__
        while step is not None and step.tb_next is not None:
            step = step.tb_next
        return step is not None and step.tb_frame.f_code.co_filename in self._files

    def _ask(self, question: str, *args: Any) -> Any:
        """Answer a rewritten question, symbolically where an argument is a traced value."""
        if self.tracer is not None and any(self.tracer.is_symbolic(argument) for argument in args):
            return self.tracer.ask(question, args)
        if self.tracer is not None and (found := self.tracer.ask_inside(question, args)) is not None:
            return found
        return _CONCRETE[question](*args)

    def _import(
        self,
        name: str,
        scope: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        wanted: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        if level:
            base = str((scope or {})["__package__"]).split(".")
            name = ".".join([*base[: len(base) - level + 1], *([name] if name else [])])
        top = name.partition(".")[0]
        if name == "math":
            return self._math
        if top in REAL_IMPORTS:
            return builtins.__import__(name, scope, local, wanted or (), 0)
        return self.name(name if wanted else top)


_CONCRETE: Mapping[str, Callable[..., Any]] = {
    "is": lambda left, right: left is right,
    "is not": lambda left, right: left is not right,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
    "item": operator.getitem,
    "slice": lambda value, *parts: value[slice(*parts)],
    **{name: getattr(builtins, name) for name in sorted(ASKED_BUILTINS)},
}
_OPERATORS: Mapping[type[ast.cmpop], str] = {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}


class OrderedSet(set[Any]):
    """The value of a set display: runs through its elements in the same order in every process."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))


@lru_cache(maxsize=64)
def _code(file: str, text: str) -> CodeType:
    """Compiled source with its questions rewritten; several sandboxes execute the same files."""
    return compile(ast.fix_missing_locations(_AskInstead().visit(ast.parse(text))), file, "exec")


class _AskInstead(ast.NodeTransformer):
    """`a is b` -> `__afd_ask__("is", a, b)`; `len(a)` -> `__afd_ask__("len", a)`; and so on."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        question = _OPERATORS.get(type(node.ops[0]))
        if question is None or len(node.ops) != 1:
            return node
        return self._asked(question, [node.left, node.comparators[0]], node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or isinstance(node.slice, ast.Constant | ast.Tuple):
            return node
        if not isinstance(node.slice, ast.Slice):
            return self._asked("item", [node.value, node.slice], node)
        parts = [part or ast.Constant(None) for part in (node.slice.lower, node.slice.upper, node.slice.step)]
        return self._asked("slice", [node.value, *parts], node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        plain = not node.keywords and not any(isinstance(argument, ast.Starred) for argument in node.args)
        if isinstance(node.func, ast.Name) and node.func.id in ASKED_BUILTINS and node.args and plain:
            return self._asked(node.func.id, node.args, node)
        return node

    def visit_Set(self, node: ast.Set) -> ast.expr:
        self.generic_visit(node)
        return ast.copy_location(ast.Call(ast.Name(SET, ast.Load()), [ast.Tuple(node.elts, ast.Load())], []), node)

    @staticmethod
    def _asked(question: str, args: list[ast.expr], node: ast.expr) -> ast.expr:
        hook = ast.Name(HOOK, ast.Load())
        return ast.copy_location(ast.Call(hook, [ast.Constant(question), *args], []), node)
