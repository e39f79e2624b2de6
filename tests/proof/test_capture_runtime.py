"""What the layers run when they are called: the same operators twice, none of which reads a tensor on the host.

A dispatch mode records every operator with its tensors' shapes, dtypes and devices and its other arguments. It looks
into vLLM's and our own opaque operators too, but not into C++ kernels. The two calls have the same shapes, different
hidden states and so different routing. Beyond that, the attention layer's list with the FFN layer's in the place of the
exchange must be, operator by operator, the list of upstream's own layer: the split adds the exchange and nothing else.

Upstream forces some host reads on its own CPU backend of latent attention (`EXCEPTIONS`); the FFN role has none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import LayerName

from afd_runtime import link
from afd_runtime.ffn_step import FFNStep
from tests.proof.families import FAMILIES, SIZE, Family
from tests.proof.models import (
    BATCHES,
    Batch,
    Built,
    Models,
    build_all,
    exchange_in_process,
    fill_caches,
    finish,
    forward_context,
    random_hidden,
)

DTYPES = (torch.bfloat16, torch.float16)
OPAQUE = ("afd", "vllm", "vllm_ir")
"""Namespaces of operators that are written in Python."""
READS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "lift_fresh"),
        *("nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "repeat_interleave"),
    )
)
"""Operators whose result, or its shape, comes to the host, or that bring a value from there."""
EXCEPTIONS = {
    ("aten::item", "vllm::unified_mla_kv_cache_update"),
    ("aten::item", "vllm::unified_mla_attention_with_output"),
}
"""In the CPU_MLA backend: a test for padding slots before the cache is written, the bounds of prefilled requests."""


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    inside: str
    """The opaque operator that ran it, if any."""
    arguments: tuple[str, ...]
    reads: bool


class Recorder(TorchDispatchMode):
    """Keeps the operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._inside: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name
        leaves = tree_leaves((args, kwargs))
        place = len(self.ops)
        self.ops.append(Op(name, self._inside[-1] if self._inside else "", tuple(map(_text, leaves)), reads=False))
        if func.namespace in OPAQUE:
            self._inside.append(name)
            with self:
                result = func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
            self._inside.pop()
        else:
            result = func(*args, **kwargs)
        if name in READS or _masks(name, leaves) or _moves(leaves, tree_leaves(result)):
            ran = self.ops[place]
            self.ops[place] = Op(ran.name, ran.inside, ran.arguments, reads=True)
        return result


def _text(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}@{leaf.device}"
    return repr(leaf.value if isinstance(leaf, LayerName) else leaf)


def _masks(name: str, leaves: list[Any]) -> bool:
    """Whether it indexes by a mask: how many elements that are is known on the host only after a read."""
    indexed = name in ("aten::index", "aten::index_put", "aten::index_put_")
    return indexed and any(isinstance(leaf, Tensor) and leaf.dtype is torch.bool for leaf in leaves[1:])


def _moves(arguments: list[Any], results: list[Any]) -> bool:
    """Whether it has tensors of more than one device; a factory, which has no tensor to read, may choose its own."""
    taken = {leaf.device for leaf in arguments if isinstance(leaf, Tensor)}
    return bool(taken) and len(taken | {leaf.device for leaf in results if isinstance(leaf, Tensor)}) > 1


@contextmanager
def recording() -> Iterator[list[Op]]:
    recorder = Recorder()
    with torch.no_grad(), recorder:
        yield recorder.ops


def reads(ops: list[Op]) -> list[tuple[str, str]]:
    return [(op.name, op.inside) for op in ops if op.reads]


class Answers:
    """A link whose peer has computed before."""

    def __init__(self, answer: Tensor) -> None:
        self._answer = answer

    def send(self, x: Tensor, extras: link.Extras, layer: int, opens_step: bool) -> None:
        del x, extras, layer, opens_step

    def recv(self, out: Tensor, layer: int) -> None:
        del layer
        out.copy_(self._answer)


EXCHANGE = [
    ("afd::send", ""),
    ("aten::new_empty", "afd::send"),
    ("afd::recv", ""),
    ("aten::new_empty", "afd::recv"),
    ("aten::copy_", "afd::recv"),
]
"""The last is the link's."""


def record_layer(built: Built, index: int, batch: Batch, *, residual: bool, seed: int) -> list[Op]:
    """Of upstream's or the attention role's."""
    dtype = built.config.model_config.dtype
    hidden, added = (random_hidden(batch.tokens, dtype, seed=seed + number) for number in range(2))
    positions = batch.positions()
    fill_caches(built.config)
    with forward_context(built.config, batch), recording() as ops:
        built.layer(index)(positions, hidden, added if residual else None, None)
    return ops


def record_ffn(built: Built, index: int, tokens: int, *, seed: int) -> list[Op]:
    hidden = random_hidden(tokens, built.config.model_config.dtype, seed=seed)
    with set_forward_context(None, built.config, num_tokens=tokens), recording() as ops:
        built.layer(index)(hidden)
    return ops


def joined(attention: list[Op], ffn: list[Op]) -> list[Op]:
    """The FFN's operators in the place of the exchange."""
    start = [op.name for op in attention].index("afd::send")
    exchange = attention[start : start + len(EXCHANGE)]
    assert [(op.name, op.inside) for op in exchange] == EXCHANGE
    return [*attention[:start], *ffn, *attention[start + len(EXCHANGE) :]]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def models(request: pytest.FixtureRequest, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Models:
    family: Family = request.param
    made = build_all(family, tmp_path_factory.mktemp("config"), dtype)
    finish(made)
    return made


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("residual", [False, True])
def test_layers_run_the_same_operators_twice_and_those_of_upstreams_layer(
    models: Models, residual: bool, name: str
) -> None:
    batch = BATCHES[name]
    for index in range(SIZE.layers):
        link.install(Answers(random_hidden(batch.tokens, models.native.config.model_config.dtype, seed=9)))
        native = record_layer(models.native, index, batch, residual=residual, seed=1)
        attention = record_layer(models.attention, index, batch, residual=residual, seed=1)
        ffn = record_ffn(models.ffn, index, batch.tokens, seed=1)
        assert attention == record_layer(models.attention, index, batch, residual=residual, seed=5)
        assert ffn == record_ffn(models.ffn, index, batch.tokens, seed=5)
        assert joined(attention, ffn) == native
        assert reads(ffn) == []
        assert reads(attention) == reads(native)
        assert set(reads(attention)) <= EXCEPTIONS


@pytest.mark.parametrize("name", BATCHES)
def test_the_whole_step_runs_the_same_operators_twice(models: Models, name: str) -> None:
    """The attention model over all its layers, and the step that the FFN role serves."""
    batch = BATCHES[name]

    def attention(built: Built, shift: int) -> list[Op]:
        token_ids, positions = (torch.arange(batch.tokens) * 7 + shift) % SIZE.vocabulary, batch.positions()
        fill_caches(built.config)
        with forward_context(built.config, batch), recording() as ops:
            built.model(token_ids, positions)
        return ops

    exchange_in_process(models)
    split = attention(models.attention, 0)
    assert split == attention(models.attention, 11)
    native = attention(models.native, 0)
    assert reads(split) == reads(native)
    assert set(reads(split)) <= EXCEPTIONS
    # The FFN runs inside the link here, and the link inside the operator that receives.
    assert [op.name for op in split if op.inside == "" and op.name.startswith("afd::")] == [
        "afd::send",
        "afd::recv",
    ] * SIZE.layers

    with set_current_vllm_config(models.ffn.config):
        step = FFNStep(model=models.ffn.model, vllm_config=models.ffn.config)

    def ffn(seed: int) -> list[Op]:
        link.install(Answers(random_hidden(batch.tokens, models.ffn.config.model_config.dtype, seed=seed)))
        tokens_like = torch.empty(batch.tokens)
        with set_forward_context(None, models.ffn.config, num_tokens=batch.tokens), recording() as ops:
            step(tokens_like)
        return ops

    assert ffn(1) == ffn(5)
    assert reads(ffn(1)) == []


class Tiny(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.forward = function


def record_tiny(function: Callable[[Tensor], Any], x: Tensor) -> list[Op]:
    with recording() as ops:
        Tiny(function)(x)
    return ops


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: x + 1 if x.sum() > 0 else x, "aten::_local_scalar_dense"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: torch.masked_select(x, x > 0), "aten::masked_select"),
        (lambda x: x.to("meta"), "aten::_to_copy"),
        (lambda x: torch.empty(4, device="meta").copy_(x), "aten::copy_"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "aten::lift_fresh"),
    ],
)
def test_a_host_read_is_seen(function: Callable[[Tensor], Any], read: str) -> None:
    """The check can fail, on each kind of read."""
    assert [name for name, _ in reads(record_tiny(function, torch.ones(4)))] == [read]


def test_a_read_inside_an_opaque_operator_is_seen() -> None:
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("afd_test_of_a_hidden_read(Tensor x) -> Tensor")
    library.impl("afd_test_of_a_hidden_read", lambda x: x * x.sum().item(), "CompositeExplicitAutograd")
    ops = record_tiny(torch.ops.vllm.afd_test_of_a_hidden_read, torch.ones(4))
    assert [(name.removeprefix("aten::"), inside) for name, inside in reads(ops)] == [
        ("item", "vllm::afd_test_of_a_hidden_read")
    ]


def test_a_branch_on_data_makes_lists_differ() -> None:
    def branches(x: Tensor) -> Tensor:
        return x * 2 if x[0].item() > 0 else x + x

    assert record_tiny(branches, torch.ones(4)) != record_tiny(branches, -torch.ones(4))


def test_other_shapes_make_lists_differ() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert record_tiny(double, torch.ones(4)) == record_tiny(double, torch.zeros(4))
    assert record_tiny(double, torch.ones(4)) != record_tiny(double, torch.ones(5))
