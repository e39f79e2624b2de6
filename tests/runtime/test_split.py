"""Stand-ins and the weight filter, on a model small enough to read. Imports vLLM for `PPMissingLayer`."""

import logging
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from afd_runtime import link
from afd_runtime.split import (
    AttentionModel,
    FFNLayer,
    FFNModel,
    Inert,
    OutlinedLayer,
    RemoteFFN,
    RemoteSum,
    Unowned,
    bind,
    bind_default,
    find_layers,
    owned,
)
from afd_runtime.surroundings import drop_surroundings

upstream = ModuleType("upstream")


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = upstream.Attn(2)
        self.mlp = upstream.Mlp(4)
        self.mlp_norm = Mlp(1)


class Model(nn.Module):
    """As upstream's ForCausalLM: builds by global names, loads strictly."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList([upstream.Layer() for _ in range(3)])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        return {name for name, tensor in weights if parameters[name].data.copy_(tensor) is not None}


class Remote(RemoteFFN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exchange(x)


class FFNSide(FFNLayer, Layer):
    def __init__(self) -> None:
        with bind(upstream, Attn=Unowned):
            super().__init__()
        self.mlp_norm = Unowned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mlp(x)
        return result


class AttentionSide(AttentionModel, Model):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with bind(upstream, Mlp=Remote):
            super().__init__(*args, **kwargs)


class FFNRole(FFNModel, Model):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with bind(upstream, Layer=FFNSide):
            super().__init__(*args, **kwargs)


class FakeModelConfig:
    dtype = torch.bfloat16

    def get_hidden_size(self) -> int:
        return 8

    def get_vocab_size(self) -> int:
        return 16


class FakeVllmConfig:
    model_config = FakeModelConfig()


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(link, "prepare", lambda vllm_config, wrapper, layers: seen.append(layers))
    vars(upstream).update(Attn=Mlp, Mlp=Mlp, Layer=Layer)
    return seen


def test_bind_restores_also_when_nested_and_when_it_fails() -> None:
    with bind(upstream, Mlp=Unowned):
        with bind(upstream, Mlp=Remote, Attn=Unowned):
            assert (upstream.Mlp, upstream.Attn) == (Remote, Unowned)
        assert (upstream.Mlp, upstream.Attn) == (Unowned, Mlp)
    with pytest.raises(ZeroDivisionError), bind(upstream, Mlp=Unowned):
        raise ZeroDivisionError
    assert upstream.Mlp is Mlp


def test_bind_refuses_a_name_that_upstream_lacks() -> None:
    with pytest.raises(AttributeError) as error, bind(upstream, Mlp=Unowned, Gone=Unowned):
        pass
    assert str(error.value) == "upstream has no 'Gone' to bind: the wrapper was made from other source"
    assert upstream.Mlp is Mlp


class Choosing:
    """Its parts' classes are defaults of its constructor's parameters."""

    def __init__(self, width: int = 2, kind: type = Mlp, *, other: type = Layer) -> None:
        self.built = (width, kind, other)


class ChoosingSide(Choosing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with bind_default(self, kind=Unowned):
            self.inside = owned(upstream, "Choosing")().built
            with bind_default(self, other=Remote):
                super().__init__(*args, **kwargs)


def test_bind_default_of_the_constructor_that_has_it() -> None:
    vars(upstream).update(Choosing=Choosing)
    role = ChoosingSide()
    assert role.built == (2, Unowned, Remote)
    assert role.inside == Choosing().built == (2, Mlp, Layer)
    assert ChoosingSide(3, Model).built == (3, Model, Remote)


def test_bind_default_refuses_a_parameter_that_upstream_lacks() -> None:
    with pytest.raises(AttributeError) as error, bind_default(Choosing(), gone=Unowned):
        pass
    assert str(error.value) == (
        "no constructor of Choosing has a default of 'gone' to bind: the wrapper was made from other source"
    )
    assert Choosing().built == (2, Mlp, Layer)


def test_a_class_of_the_roles_own_is_built_with_native_names() -> None:
    def build(width: int, reduce_results: bool = True) -> tuple[object, int, bool]:
        return upstream.Mlp, width, reduce_results

    vars(upstream).update(Block=build)
    with bind(upstream, Mlp=Unowned, Block=Unowned):
        assert owned(upstream, "Block")(4) == (Mlp, 4, True)
        assert owned(upstream, "Block", reduce_results=True)(width=4, reduce_results=False) == (Mlp, 4, True)
        assert upstream.Mlp is Unowned
    del upstream.Block


def test_what_is_set_inside_the_other_roles_module_goes_nowhere() -> None:
    norm = Inert()
    norm.reduce_results = False  # type: ignore[attr-defined]
    assert not hasattr(norm.weight, "weight_loader")
    norm.weight.weight_loader = print  # type: ignore[attr-defined]
    assert not hasattr(norm.weight, "weight_loader")
    with pytest.raises(TypeError) as error:
        bool(norm)
    assert str(error.value) == "afd: a part of a module that this role does not own was asked whether it is true"


def test_a_sum_says_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_current", link.Loopback())
    whole, part = RemoteSum("x", reduce_results=True), RemoteSum(reduce_results=False)
    assert (whole.moe_config.skip_final_all_reduce, whole.reduce_results) == (False, True)
    assert (part.moe_config.skip_final_all_reduce, part.reduce_results) == (True, False)
    assert whole.exchange(torch.ones(2, 8)).shape == (2, 8)  # asks for no rank: there may be no group of them


def test_a_layer_without_an_ffn_does_not_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dense(FFNLayer, nn.Module):
        shared = ("norm",)

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(2), nn.ModuleList([Unowned()])

    assert not Dense().exchanges
    assert FFNSide().exchanges
    assert find_layers(nn.ModuleDict({"0": Dense(), "1": FFNSide()}), FFNLayer).keys() == {1}

    class Bare(OutlinedLayer, nn.Module):
        pass

    x = torch.ones(2, 8)
    assert Bare().exchange(x) is x


def test_unowned_takes_anything_and_owns_nothing() -> None:
    assert list(Unowned(1, "a", key=object()).parameters()) == []


def test_attention_numbers_its_exchanges(prepared: list[tuple[int, ...]]) -> None:
    model = AttentionSide(vllm_config=FakeVllmConfig())
    remote = find_layers(model, RemoteFFN)
    assert {layer: (module.layer, module.opens_step) for layer, module in remote.items()} == {
        0: (0, True), 1: (1, False), 2: (2, False)
    }  # fmt: skip
    assert prepared == [(0, 1, 2)]


@pytest.mark.parametrize("mixin", [AttentionModel, FFNModel])
def test_a_wrapper_that_takes_no_effect_is_refused(mixin: type) -> None:
    """Upstream built its own layers: serving them would be the whole model on one role."""
    with pytest.raises(RuntimeError) as error:
        type("Ineffective", (mixin, Model), {})(vllm_config=FakeVllmConfig())
    assert str(error.value) == "afd: Ineffective built no split layer; do: report this model to afd-compiler"


def checkpoint() -> Iterator[tuple[str, torch.Tensor]]:
    for layer in range(3):
        for name, width in (("attn", 2), ("mlp", 4), ("mlp_norm", 1)):
            yield f"layers.{layer}.{name}.weight", torch.full((width,), float(layer))


@pytest.mark.parametrize(
    ("role", "owned", "line"),
    [
        (
            AttentionSide,
            {"attn", "mlp_norm"},
            "afd: role attention owns 9 parameters (6 tensors of the checkpoint loaded, 3 left to the other role)",
        ),
        (
            FFNRole,
            {"mlp"},
            "afd: role ffn owns 12 parameters (3 tensors of the checkpoint loaded, 6 left to the other role)",
        ),
    ],
)
def test_weights_are_filtered_by_whole_path_components(
    role: Any,
    owned: set[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    model = role(vllm_config=FakeVllmConfig())
    with caplog.at_level(logging.INFO, logger="vllm"):
        loaded = model.load_weights(checkpoint())
    assert loaded == {f"layers.{layer}.{name}.weight" for layer in range(3) for name in owned}
    assert [record.getMessage() for record in caplog.records if "afd:" in record.getMessage()] == [line]


def test_a_surplus_tensor_is_upstreams_to_report() -> None:
    model = AttentionSide(vllm_config=FakeVllmConfig())
    with pytest.raises(KeyError, match=r"layers\.0\.mlpx\.weight"):
        model.load_weights([("layers.0.mlpx.weight", torch.zeros(1))])


def test_the_dummy_run_of_the_ffn() -> None:
    model = FFNRole(vllm_config=FakeVllmConfig())
    calls: list[torch.Size] = []
    for layer in find_layers(model, FFNLayer).values():
        layer.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    hidden = model(None, torch.arange(5), inputs_embeds=None)
    assert torch.equal(hidden, torch.zeros(5, 8, dtype=torch.bfloat16))
    assert calls == [(5, 8)] * 3
    assert torch.equal(model.compute_logits(hidden[:2]), torch.zeros(2, 16, dtype=torch.bfloat16))


def test_the_dummy_run_passes_what_goes_with_the_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def forward(self: Any, x: torch.Tensor, *extras: torch.Tensor | None) -> torch.Tensor:
        seen.append([extra if extra is None else (extra.shape, extra.dtype) for extra in extras])
        return x

    monkeypatch.setattr(FFNSide, "extras", ("hidden", "input_ids", "mask"))
    monkeypatch.setattr(FFNSide, "forward", forward)
    FFNRole(vllm_config=FakeVllmConfig())(None, torch.arange(5))
    assert seen == [[((5, 8), torch.bfloat16), ((5,), torch.int32), None]] * 3


def test_an_error_of_upstream_while_loading_names_the_tensor() -> None:
    model = AttentionSide(vllm_config=FakeVllmConfig())
    with pytest.raises(KeyError) as error:
        model.load_weights([("layers.0.attn.surplus", torch.zeros(2))])
    assert error.value.__notes__ == ["afd: role attention was loading layers.0.attn.surplus"]


def test_what_stands_around_the_ffns_layers_is_dropped_unless_a_layer_shares_it() -> None:
    with bind(upstream, Layer=FFNSide):
        model = Model(vllm_config=FakeVllmConfig())
    layers = model.layers
    model.tower, model.shared, model.plain = nn.ModuleList([Mlp(3)]), layers[0].mlp, nn.Identity()
    drop_surroundings(model)
    assert isinstance(model.tower, Unowned)
    assert model.shared is layers[0].mlp
    assert model.plain.__class__ is nn.Identity
    assert {name for name, _ in model.named_parameters()} == {f"layers.{index}.mlp.weight" for index in range(3)}
