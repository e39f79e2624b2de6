"""What emitted modules are built from: stand-ins for what a role does not own, and the two roles' model mixins."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models.utils import PPMissingLayer, extract_layer_index, init_vllm_registered_model

from afd_runtime import ops
from afd_runtime.header import Extra

_bindings: list[tuple[object, dict[str, object], dict[str, object]]] = []
"""What is bound now: (module or class, stand-ins, natives), the latest last."""


@contextmanager
def bind(owner: ModuleType | type | FunctionType, **names: object) -> Iterator[None]:
    """Rebind globals of an upstream module, or attributes of something, while upstream's own constructors run."""
    for name in names:
        if not hasattr(owner, name):
            raise AttributeError(f"{owner.__name__} has no {name!r} to bind: the wrapper was made from other source")
    native = {name: getattr(owner, name) for name in names}
    _bindings.append((owner, names, native))
    try:
        _set(owner, names)
        yield
    finally:
        _set(owner, native)
        _bindings.pop()


@contextmanager
def bind_default(built: object, **held: object) -> Iterator[None]:
    """The same for the default of a parameter of the constructor, a class: it was evaluated long ago."""
    ((name, stand_in),) = held.items()
    init = _constructor_with(type(built), name)
    parameters = [p.replace(default=stand_in) if p.name == name else p for p in signature(init).parameters.values()]
    given = [p for p in parameters if p.default is not p.empty]
    by_position = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
    by_keyword = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    with bind(init, __defaults__=by_position, __kwdefaults__=by_keyword):
        yield


def _constructor_with(cls: type, name: str) -> FunctionType:
    """The nearest constructor that has a default for the parameter."""
    inits = (vars(base).get("__init__") for base in cls.__mro__)
    for init in (init for init in inits if isinstance(init, FunctionType)):
        found = signature(init).parameters.get(name)
        if found and found.default is not found.empty:
            return init
    raise AttributeError(
        f"no constructor of {cls.__name__} has a default of {name!r} to bind: the wrapper was made from other source"
    )


def owned(owner: ModuleType, name: str, **instead: object) -> Callable[..., Any]:
    """A class of what the role owns, built with all names as upstream has them: its own code uses bound ones too.

    `instead` are values for keywords that upstream passes.
    """
    return partial(_build_natively, owner, name, instead)


def _build_natively(owner: ModuleType, name: str, instead: dict[str, object], *args: Any, **kwargs: Any) -> Any:
    kwargs |= {word: value for word, value in instead.items() if word in kwargs}
    suspended = [*_bindings]
    _bindings.clear()
    for bound, _, native in reversed(suspended):
        _set(bound, native)
    try:
        return getattr(owner, name)(*args, **kwargs)
    finally:
        for bound, names, _ in suspended:
            _set(bound, names)
        _bindings.extend(suspended)


def _set(owner: object, names: dict[str, object]) -> None:
    for name, value in names.items():
        setattr(owner, name, value)


class Unowned(PPMissingLayer):
    """In the place of a module that the other role owns; has no parameters and takes any constructor arguments."""

    weight = None

    def tie_weights(self, *_: object) -> "Unowned":
        """A head that shares the embedding's weights is as little here as the embedding."""
        return self


class Inert:
    """Something inside a module that the other role owns: what upstream's constructors set on it goes nowhere."""

    def __init__(self, _: object = None) -> None:
        pass

    @property
    def weight(self) -> "Inert":
        return Inert()

    def __bool__(self) -> bool:
        raise TypeError("afd: a part of a module that this role does not own was asked whether it is true")


class RemoteFFN(Unowned):
    """In the place of the FFN on the attention role: what upstream passes to it makes one exchange."""

    layer: int = -1
    opens_step: bool = False

    def exchange(self, hidden_states: torch.Tensor, *extras: torch.Tensor | None) -> torch.Tensor:
        """[tokens, hidden] to the FFN role, with what else it needs, and what it makes of it back."""
        tokens, hidden = hidden_states.shape
        ticket = ops.send(hidden_states, self.layer, self.opens_step, extras)
        return ops.recv(ticket, tokens, hidden, hidden_states.dtype, self.layer)


class RemoteSum(RemoteFFN):
    """An FFN whose sum over its ranks upstream can leave to the next reader, who takes it over attention's ranks.

    The FFN role has taken the sum; of attention's ranks one passes it on and the others zeros.
    """

    def __init__(self, *args: Any, reduce_results: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.whole = reduce_results

    def itself(self) -> "RemoteSum":
        """What upstream asks about the sum is answered here, whatever inside the FFN it asks."""
        return self

    moe_config = property(itself)

    @property
    def skip_final_all_reduce(self) -> bool:
        return not self.whole

    @property
    def reduce_results(self) -> bool:
        return self.whole

    def exchange(self, hidden_states: torch.Tensor, *extras: torch.Tensor | None) -> torch.Tensor:
        """As `RemoteFFN.exchange`; this rank's part of what comes back."""
        received = super().exchange(hidden_states, *extras)
        return received if self.whole else ops.partial_sum(received)


class OutlinedLayer:
    """In front of upstream's layer on the attention role, where the FFN's work is more than a call of one module."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        has_ffn = any(isinstance(module, Unowned) for module in self.modules())
        self.afd_ffn = RemoteFFN() if has_ffn else None

    def exchange(self: Any, hidden_states: torch.Tensor, *extras: torch.Tensor | None) -> Any:
        """As `RemoteFFN.exchange`; nothing in a layer that was built without an FFN."""
        return hidden_states if self.afd_ffn is None else self.afd_ffn.exchange(hidden_states, *extras)


class NothingSplitError(RuntimeError):
    """A role's model that has no layer to exchange with the other role."""


_whole_parts: list[str] | None = None
"""While a role's model is built: why models of the registry within it have no wrapper."""


def build_part(vllm_config: Any, *, prefix: str = "", hf_config: Any = None, architectures: Any = None) -> Any:
    """vLLM's `init_vllm_registered_model`, for the role's part of that model."""
    from afd_runtime.parts import part_architectures

    architectures = part_architectures(vllm_config, hf_config, architectures)
    return init_vllm_registered_model(vllm_config, prefix=prefix, hf_config=hf_config, architectures=architectures)


def is_part() -> bool:
    """Whether a role's model is being built, so that a configuration made now is of a model within it."""
    return _whole_parts is not None


def build_whole(reason: str) -> None:
    """Note why a model within the one that is built is as upstream has it: a vision tower, say."""
    if _whole_parts is not None:
        _whole_parts.append(reason)


@contextmanager
def _building() -> Iterator[list[str]]:
    global _whole_parts
    before, _whole_parts = _whole_parts, [] if _whole_parts is None else _whole_parts
    try:
        yield _whole_parts
    finally:
        _whole_parts = before


class FFNLayer:
    """Marks the decoder layers of the FFN role. Their forward takes and returns [tokens, hidden]."""

    extras: tuple[str, ...] = ()
    """What forward takes besides: "hidden" for one like the first, the name of an input of the model for others."""

    shared: tuple[str, ...] = ()
    """Submodules that attention has as well."""

    @property
    def exchanges(self: Any) -> bool:
        """Whether something in this layer is the role's alone; one whose FFN is dense can be attention's altogether."""
        inside = (module for name, module in self.named_modules() if name.partition(".")[0] not in ("", *self.shared))
        return any(not isinstance(module, Unowned | torch.nn.ModuleList) for module in inside)


def find_layers(model: torch.nn.Module, kind: type) -> dict[int, Any]:
    """Modules of a kind by layer number, in order; of the FFN role's layers those that exchange."""
    kinds = ((name, module) for name, module in model.named_modules() if isinstance(module, kind))
    found = {extract_layer_index(name): module for name, module in kinds if getattr(module, "exchanges", True)}
    return dict(sorted(found.items(), key=itemgetter(0)))


if TYPE_CHECKING:
    _Model = torch.nn.Module
else:
    _Model = object  # upstream's class, behind the mixin, brings nn.Module


class _RoleModel(_Model):
    """In front of upstream's ForCausalLM class, which is the Module."""

    role: str
    split: type

    def __init__(self, *, vllm_config: Any, prefix: str = "", **layer_class: type) -> None:
        with _building() as whole:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **layer_class)
        from afd_runtime.link import prepare

        layers = tuple(find_layers(self, self.split))
        if not layers:
            reason = "; ".join(["", *whole])
            raise NothingSplitError(
                f"afd: {type(self).__name__} built no split layer{reason}; do: report this model to afd-compiler"
            )
        prepare(vllm_config, wrapper=type(self), layers=layers)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Hand upstream the tensors that lie under no stand-in, so that it reports missing and surplus ones itself."""
        from afd_runtime.log import init_logger

        unowned = {tuple(name.split(".")) for name, module in self.named_modules() if isinstance(module, Unowned)}
        mapper = getattr(self, "hf_to_vllm_mapper", None)
        loaded = left = 0
        latest = "nothing yet"

        def owned() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal loaded, left, latest
            for name, tensor in weights:
                here = mapper.apply_list([name]) if mapper else [name]
                path = tuple((here or [name])[0].split("."))
                if any(path[:end] in unowned for end in range(1, len(path))):
                    left += 1
                    continue
                loaded += 1
                latest = name
                yield name, tensor

        try:
            result = super().load_weights(owned())  # type: ignore[misc]
        except Exception as error:
            error.add_note(f"afd: role {self.role} was loading {latest}")
            raise
        parameters = sum(parameter.numel() for parameter in self.parameters())
        init_logger(__name__).info(
            "afd: role %s owns %d parameters (%d tensors of the checkpoint loaded, %d left to the other role)",
            self.role, parameters, loaded, left,
        )  # fmt: skip
        return result


class AttentionModel(_RoleModel):
    """The attention role of a model: upstream's own, with connector nodes in the place of its FFNs."""

    role = "attention"
    split = RemoteFFN

    def __init__(self, *, vllm_config: Any, prefix: str = "", **layer_class: type) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **layer_class)
        remote = find_layers(self, RemoteFFN)
        for layer, module in remote.items():
            module.layer = layer
            module.opens_step = layer == min(remote)


class FFNModel(_RoleModel):
    """The FFN role of a model. vLLM calls it for its dummy runs only; `afd_runtime.ffn_step` serves the real steps."""

    role = "ffn"
    split = FFNLayer

    def __init__(self, *, vllm_config: Any, prefix: str = "", **layer_class: type) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **layer_class)
        from afd_runtime.surroundings import drop_surroundings

        drop_surroundings(self)
        model_config = vllm_config.model_config
        self.afd_hidden_size: int = model_config.get_hidden_size()
        self.afd_dtype: torch.dtype = model_config.dtype
        self.afd_vocab_size: int = model_config.get_vocab_size()
        self.afd_extras = next(iter(find_layers(self, FFNLayer).values())).extras

    def usual_extras(self) -> tuple[Extra | None, ...]:
        """What comes with the hidden states in steps of plain text, as vLLM's runners make its inputs."""
        known = {"hidden": Extra(self.afd_dtype, self.afd_hidden_size), "input_ids": Extra(torch.int32, 0)}
        return tuple(known.get(name) for name in self.afd_extras)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Run each layer once on zeros, so that its memory is measured; return zeros [tokens, hidden]."""
        tokens = positions.shape[-1]
        zeros = positions.new_zeros((tokens, self.afd_hidden_size), dtype=self.afd_dtype)
        usual = self.usual_extras()
        for layer in find_layers(self, FFNLayer).values():
            layer(zeros.clone(), *(e and positions.new_zeros(e.shape(tokens), dtype=e.dtype) for e in usual))
        return zeros

    def compute_logits(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """[rows, hidden] to zeros [rows, vocab]: the dummy sampler run of a model without a head."""
        return hidden_states.new_zeros((hidden_states.shape[0], self.afd_vocab_size))
