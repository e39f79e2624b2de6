"""Symbolic execution of one layer, construction and forward, into one torch.fx graph.

Everything unknown is symbolic: configuration values as well as tensors. Where upstream branches on a symbolic
value, the run takes one answer and remembers the question; `trace` asks again with the other answer. So each path
through the layer is one straight graph, and a variant is the set of answers that leads to it.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from afd_compiler.diagnostics import Location, RefusalKind, Refused
from afd_compiler.expressions import Expressions
from afd_compiler.light_graph import LightGraph
from afd_compiler.sandbox import ASKED_BUILTINS, Sandbox, Stub
from afd_compiler.symbolic import Symbolic
from afd_compiler.symbols import platform_answer

ACTIVATION_DTYPE = "dtype"
"""All that submodules give is taken to have one dtype: a question about one tensor's is a question about all."""
REDUCES = "reduce_results"
"""The constructor argument by which vLLM's FFNs can leave out the all-reduce over their ranks."""
REDUCED, UNREDUCED = f"{REDUCES}=True", f"{REDUCES}=False"
SKIPS = "skip_final_all_reduce"
"""What a fused MoE says of that argument when it is asked later."""
TORCH_MODULES = "torch.nn."
"""Where torch's own module classes are; they run as they are, and no name of upstream's can be bound for them."""
SHAPE_QUESTIONS: frozenset[Any] = frozenset(
    {"shape", "ndim", "size", "dim", "numel", "dtype", "device", "is_contiguous"}
)
"""Attributes and methods of a tensor that tell nothing of its values."""
_NEGATIONS: Mapping[Any, Any] = {operator.is_not: operator.is_, operator.ne: operator.eq}
_QUESTIONS: Mapping[str, Callable[..., Any]] = {"is": operator.is_, "is not": operator.is_not}


@dataclass(frozen=True, slots=True)
class Child:
    """A submodule as the layer's `__init__` built it."""

    name: str
    """The first, as in named_parameters."""
    names: tuple[str, ...]
    class_name: str
    arguments: tuple[str, ...]
    """As written in the call, values as expressions: "config.size", "reduce_results=False"; then what `__init__` sets
    inside it."""
    location: Location


class LayerTracer(Expressions, fx.proxy.GraphAppendingTracer):
    """Records one run. `answers` are the decisions taken; a new question is answered yes, or refused."""

    def __init__(
        self,
        sandbox: Sandbox,
        entered: frozenset[str],
        answers: Mapping[str, bool],
        *,
        forks: bool,
        received: bool = False,
    ) -> None:
        super().__init__(LightGraph())
        self.sandbox, self.entered, self.forks, self.received = sandbox, entered, forks, received
        self._sent: fx.Node | None = None
        self.answers = dict(answers)
        self.asked: dict[str, bool] = {}
        self.locations: dict[fx.Node, Location] = {}
        self.children: dict[str, Child] = {}
        self._texts: dict[fx.Node, str] = {}
        self._built: dict[int, tuple[Any, tuple[str, ...], Location]] = {}
        self._root: Any = None
        self._dtype: Any = None
        self._tensors: set[fx.Node] = set()
        self._data: dict[fx.Node, bool] = {}
        self._spelled: dict[str, Symbolic] = {}
        self._paths: dict[int, str] = {}
        self._attributes: dict[tuple[fx.Node, str], Any] = {}
        self._set: dict[str, list[str]] = {}

    def construct(self, cls: type, arguments: Mapping[str, Any], set_outside: Iterable[str] = ()) -> Any:
        """Build the layer; its submodules are recorded, not entered. What code around it sets later is unknown."""
        self._root = root = cls(**arguments)
        named = [*vars(root).items(), *vars(root).get("_modules", {}).items()]
        members: dict[int, list[str]] = {}
        for name, value in named:
            members.setdefault(id(value), []).append(name)
            if type(value) in (torch.nn.ModuleList, torch.nn.Sequential):
                members |= {id(item): [f"{name}.{position}"] for position, item in enumerate(value)}
        for identity, (value, words, location) in self._built.items():
            if identity in members:
                name, *_ = members[identity]
                self._paths[identity] = name
                kind = type(value).__name__
                direct = (f"self.{kind}.{text}" for text in self.argument_texts((), _set_directly(value)))
                self.children[name] = Child(
                    name, tuple(members[identity]), kind, (*words, *direct, *self._set.get(kind, ())), location
                )
        for name, value in vars(root).get("_modules", {}).items():
            if type(value).__module__.startswith(TORCH_MODULES) and getattr(value, "weight", None) is not None:
                kind = f"{TORCH_MODULES}{type(value).__name__}"
                self.children.setdefault(name, Child(name, (name,), kind, (), self.sandbox.here() or Location("?", 0)))
        for name in set_outside:
            if name in vars(root):
                vars(root)[name] = self.create_proxy("get_attr", name, (), {})
        return root

    def forward(self, root: Any, parameters: Iterable[str]) -> Any:
        """Run the layer's forward; from here on `.dtype` means the activations'."""
        arguments = {name: self.input(name) for name in parameters}
        self._tensors = {value.node for value in arguments.values()}
        if self.received:
            self._sent = next(iter(arguments.values())).node
        self._dtype = self.input(ACTIVATION_DTYPE)
        with patch.object(type(root), "__setattr__", self._refuse_state):
            return type(root).forward(root, **arguments)

    def _refuse_state(self, name: str, value: Any) -> None:
        raise self._unsafe(f"state kept in Python: `self.{name}` is set to `{self.value_text(value)}`")

    def _unsafe(self, saw: str) -> Refused:
        return Refused(
            RefusalKind.NOT_CAPTURE_SAFE,
            at=self.sandbox.here() or Location("<inputs>", 0),
            name=type(self._root).__name__,
            saw=saw,
            do="serve this family unsplit: such a forward cannot be recorded in a graph",
        )

    def input(self, name: str) -> Any:
        """A symbolic input."""
        return self.create_proxy("placeholder", name, (), {})

    # What fx asks of a tracer.

    def proxy(self, node: fx.Node) -> Symbolic:
        return Symbolic(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Symbolic:
        return Symbolic(self.create_node(kind, target, self.create_arg(args), self.create_arg(kwargs)), self)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs)
        self.locations[node] = self.sandbox.here() or Location("<inputs>", 0)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, tuple | list):
            return type(a)(self.create_arg(item) for item in a) if type(a) in (tuple, list) else a
        if isinstance(a, dict):
            return {key: self.create_arg(value) for key, value in a.items()}
        if isinstance(a, slice):
            return slice(self.create_arg(a.start), self.create_arg(a.stop), self.create_arg(a.step))
        if isinstance(a, torch.Tensor):
            return self.create_node("get_attr", self.tensor_name(a), (), {})
        return a

    def to_bool(self, obj: fx.Proxy) -> bool:
        if self._reads_data(obj.node):
            raise self._unsafe(f"a branch on the values of a tensor: `{self.text(obj.node)}`")
        question, negated = self._question(obj.node)
        return self.decide(question) is not negated

    def settled(self, value: Any) -> bool | None:
        """What this path has decided about a value, or None."""
        if not isinstance(value, fx.Proxy):
            return value if isinstance(value, bool) else None
        question, negated = self._question(value.node)
        return (self.asked[question] is not negated) if question in self.asked else None

    def _reads_data(self, node: fx.Node) -> bool:
        """Whether a value depends on what tensors hold, and not only on their shapes or on configuration."""
        if node not in self._data:
            self._data[node] = self._depends_on_data(node)
        return self._data[node]

    def _depends_on_data(self, node: fx.Node) -> bool:
        if node.op == "call_module" or node in self._tensors:
            return True
        told = {node.target, *(arg for arg in node.args[1:2] if isinstance(arg, str))}
        asked = isinstance(node.target, Stub) and str(node.target) in ASKED_BUILTINS - {"int", "float"}
        if asked or told & SHAPE_QUESTIONS or node.target in (operator.is_, operator.is_not):
            return False
        return any(self._reads_data(argument) for argument in node.all_input_nodes)

    def _question(self, node: fx.Node) -> tuple[str, bool]:
        """The positive form of what a node asks, and whether the node asks its opposite."""
        if node.target in _NEGATIONS:
            return self._render(_NEGATIONS[node.target], node), True
        return self.text(node), False

    def tensor_name(self, tensor: torch.Tensor) -> str:
        """The layer's name for a tensor that its `__init__` made."""
        tables = (vars(self._root), *(vars(self._root)[table] for table in ("_parameters", "_buffers")))
        held = (name for table in tables for name, value in table.items() if value is tensor)
        return next(held, f"{tensor.dtype}{tuple(tensor.shape)}")

    def set_inside(self, node: fx.Node, name: str, value: Any) -> bool:
        """Whether an attribute is set inside a submodule; that is recorded as part of how the submodule is built."""
        owner = _root(node)
        if owner.op != "get_attr":
            return False
        if self._dtype is not None:
            raise self._unsafe(f"state kept in Python: `{self.text(node)}.{name}` is set to `{self.value_text(value)}`")
        kind = str(owner.target).partition(".")[0]
        self._set.setdefault(kind, []).append(f"{self.text(node)}.{name}={self.value_text(value)}")
        return True

    # What the sandbox asks.

    def is_symbolic(self, value: Any) -> bool:
        return isinstance(value, fx.Proxy)

    def ask(self, question: str, args: tuple[Any, ...]) -> Any:
        if question in _QUESTIONS:
            return self.create_proxy("call_function", _QUESTIONS[question], args, {})
        if question == "isinstance" and (
            args[1] is torch.Tensor or (isinstance(args[1], tuple) and torch.Tensor in args[1])
        ):
            return True
        if question == "item" and isinstance(args[0], dict):
            return self._chosen(args[0], args[1])
        if question == "slice" and not self.is_symbolic(args[0]):
            return self._any_part(args[0])
        if question in ("item", "slice"):
            key = args[1] if question == "item" else slice(*args[1:])
            return self.create_proxy("call_function", operator.getitem, (args[0], key), {})
        return self.create_proxy("call_function", self.sandbox.name(question), args, {})

    def ask_inside(self, question: str, args: tuple[Any, ...]) -> Any:
        """The answer where a plain argument has something symbolic in it; None where it has not."""
        if question in ("in", "not in") and isinstance(args[1], list | tuple | set):
            if any(map(self.is_symbolic, args[1])):
                return self.create_proxy("call_function", self.sandbox.name(question), (args[0], list(args[1])), {})
        elif question == "int" and isinstance(args[0], str):
            return self._spelled.get(args[0])
        return None

    def decide(self, question: str) -> bool:
        """The answer to a question on this path."""
        if "current_platform." in question:
            return platform_answer(question.rpartition(".")[2].removesuffix("()"), self.sandbox.symbols.platform)
        if question not in self.answers:
            if not self.forks:
                raise self.refused(question, f"the emitted half asks `{question}`, which upstream does not ask here")
            self.answers[question] = True
        self.asked.setdefault(question, self.answers[question])
        return self.answers[question]

    def record_construction(self, leaf: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Whether a result is whole or a partial sum decides what may be done with it, so each path settles that.
        settled = {name: bool(value) for name, value in kwargs.items() if name == REDUCES and self.is_symbolic(value)}
        arguments = tuple(self.argument_texts(args, {**kwargs, **settled}))
        self._built[id(leaf)] = (leaf, arguments, self.sandbox.here() or Location("<inputs>", 0))

    def enters(self, leaf: Any) -> bool:
        return type(leaf).__module__ in self.entered

    def call_function(self, stub: Stub, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.create_proxy("call_function", stub, args, dict(kwargs))

    def call_leaf(self, leaf: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.create_proxy("call_module", self._path_of(leaf), args, dict(kwargs))

    def name_exchange(self, leaf: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Let what a stand-in gives be known by upstream's own call, so that questions about it are upstream's."""
        if isinstance(result, fx.Proxy) and id(leaf) in self._paths:
            self._texts[result.node] = f"self.{self._paths[id(leaf)]}({self.arguments_text(args, kwargs)})"
        return result

    def leaf_attribute(self, leaf: Any, attribute: str) -> Any:
        # While a model is built, its submodules may be asked before they have a place in it.
        owner = type(leaf).__name__ if self._dtype is None else self._path_of(leaf)
        return self.create_proxy("get_attr", f"{owner}.{attribute}", (), {})

    def attribute_of(self, value: Symbolic, name: str) -> Any:
        if name == "dtype" and self._dtype is not None and self._is_activation(value.node):
            return self._dtype
        child = self.children.get(str(_root(value.node).target).partition(".")[0])
        if name == SKIPS and child and self._dtype is not None:
            return UNREDUCED in child.arguments  # the cut asks no more of it than that what it says is true
        known = (value.node, name)
        if self._dtype is not None or known not in self._attributes:
            self._attributes[known] = self.create_proxy("call_function", getattr, (value, name), {})
        return self._attributes[known]

    def _is_activation(self, node: fx.Node) -> bool:
        """Whether a value is made from what a module gave, or from what the FFN role received."""
        return node.op == "call_module" or node is self._sent or any(map(self._is_activation, node.all_input_nodes))

    def any_item(self, values: Symbolic | Stub) -> fx.Proxy:
        """One item for all that a loop in a constructor takes from a value; both halves run that same constructor."""
        if self._dtype is not None:
            raise self.refused(self.value_text(values), "a loop over a traced value")
        return self.create_proxy("call_function", next, (values,), {})

    def _chosen(self, table: Mapping[Any, Any], key: Symbolic) -> Any:
        """The entry of a dictionary that this path takes for a symbolic key: there is one, or upstream would fail."""
        *others, last = table
        return table[next((known for known in others if key == known), last)]

    def _any_part(self, values: Any) -> Any:
        """All of a sequence for the part that a constructor takes of it."""
        if self._dtype is not None:
            raise self.refused(type(values).__name__, "a part of a list, by a traced value")
        return values

    def spelled(self, value: Symbolic) -> str:
        """What stands for a value within a string, so that a number can be read back: a module's path, say."""
        text = self.text(value.node).replace(".", "·")
        self._spelled[text] = value
        return text

    def _path_of(self, leaf: Any) -> str:
        if id(leaf) in self._paths:
            return self._paths[id(leaf)]
        raise self.refused(type(leaf).__name__, "an object that is no direct submodule of the layer is used")

    def refused(self, name: str, saw: str) -> Refused:
        at = self.sandbox.here() or Location("<inputs>", 0)
        do = "serve this family unsplit: its forward cannot be followed symbolically here"
        return Refused(RefusalKind.UNTRACEABLE, at=at, name=name, saw=saw, do=do)


def _root(node: fx.Node) -> fx.Node:
    """Where a chain of attributes starts."""
    while node.target is getattr:
        node = node.all_input_nodes[0]
    return node


def _set_directly(leaf: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(leaf).items() if name[0] != "_" and name != "training"}
