"""Every weight has one owner: by name on really constructed models, and by value when they load a checkpoint.

Loading is vLLM's own `DefaultModelLoader`, up to and with its check for weights that were not initialised. Where a
checkpoint is damaged a role does what native vLLM does with the tensors it owns, and that is not always an error: the
loader's check covers norms only (parameters of a module with a quantisation method are exempt, and that is every
linear, embedding and expert), stacked parts with too many rows are cut, a surplus `.bias` is dropped. Nor does every
error name the tensor: those for a wrong shape do not.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import deepseek_v2 as upstream
from vllm.model_executor.models import utils as upstream_utils

from afd_generated.vllm_0_32_0 import deepseek_v2 as emitted
from afd_runtime.manifest import read_manifest
from tests.proof.families import DENSE_LAYERS, FAMILIES, SIZE, Family, random_tensors, write_config, write_tensors
from tests.proof.models import ROLES, Built, build

OWNERS = read_manifest(Path(emitted.__file__).with_suffix(".json")).owners


def owner_of(name: str) -> str:
    """By the manifest, whose paths are relative to the model and match whole components; `*` is a number."""
    path = name.removeprefix("model.").split(".")
    owners = [owner for pattern, owner in OWNERS.items() if _lies_under(path, pattern.split("."))]
    assert len(owners) == 1, f"{name}: {owners}"
    return owners[0]


def _lies_under(path: list[str], pattern: list[str]) -> bool:
    return len(path) > len(pattern) and all(
        part == wanted or (wanted == "*" and part.isdigit()) for part, wanted in zip(path, pattern, strict=False)
    )


@dataclass(frozen=True, slots=True)
class Trio:
    """One family's native model and both roles of it, built once for the tests of a module."""

    family: Family
    native: Built
    attention: Built
    ffn: Built

    def role(self, role: str) -> Built:
        return self.attention if role == "attention" else self.ffn


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return build_trio(request.param, tmp_path_factory.mktemp("config"))


def build_trio(family: Family, folder: Path) -> Trio:
    # vLLM remembers the stand-ins of a model by its id(), which a later model may have again.
    upstream_utils._model_to_pp_missing_layer_names.clear()
    write_config(folder, family)
    built = [build(family, folder, torch.bfloat16, role) for role in (None, *ROLES)]
    return Trio(family, *built)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of loading a checkpoint into a model."""

    given: tuple[str, ...]
    """Tensors that reached upstream's own `load_weights`."""
    returned: frozenset[str]
    """Parameters that upstream says it has loaded."""
    error: tuple[str, str] | None
    """Its type and text, of upstream's loading or of the loader's check after it."""


@dataclass(slots=True)
class _Recorder:
    given: list[str] = field(default_factory=list)
    returned: set[str] = field(default_factory=set)


def load(built: Built, folder: Path) -> Loaded:
    """Fill every parameter with NaN, then load the checkpoint in the folder."""
    seen = _Recorder()
    native = upstream.DeepseekV2ForCausalLM.load_weights

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        def recorded() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                seen.given.append(name)
                yield name, tensor

        returned: set[str] = native(self, recorded())
        seen.returned |= returned
        return returned

    for parameter in built.model.parameters():
        parameter.data.fill_(torch.nan)
    built.config.model_config.model = str(folder)
    error = None
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(built.config):
        patch.setattr(upstream.DeepseekV2ForCausalLM, "load_weights", load_weights)
        try:
            DefaultModelLoader(LoadConfig(use_tqdm_on_load=False)).load_weights(built.model, built.config.model_config)
        except Exception as raised:  # the two roles' errors are compared with the native one
            error = (type(raised).__name__, str(raised))
    return Loaded(tuple(seen.given), frozenset(seen.returned), error)


def parameters_of(built: Built) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in built.model.named_parameters()}


def test_names_shapes_and_dtypes_are_the_native_ones_and_each_has_one_owner(trio: Trio) -> None:
    native, attention, ffn = (parameters_of(built) for built in (trio.native, trio.attention, trio.ffn))
    assert attention.keys() | ffn.keys() == native.keys()
    assert attention.keys() & ffn.keys() == set()
    assert {name: (each.shape, each.dtype) for name, each in (attention | ffn).items()} == {
        name: (each.shape, each.dtype) for name, each in native.items()
    }
    assert {owner_of(name) for name in attention} == {"attention"}
    assert {owner_of(name) for name in ffn} == {"ffn"}


def test_persistent_buffers_have_one_owner(trio: Trio) -> None:
    native, attention, ffn = (built.model.state_dict().keys() for built in (trio.native, trio.attention, trio.ffn))
    assert attention | ffn == native
    assert attention & ffn == set()


def test_every_tensor_is_loaded_by_its_owner_alone_as_native_loads_it(trio: Trio, tmp_path: Path) -> None:
    tensors = random_tensors(trio.family)
    native = load(trio.native, write_tensors(tmp_path, tensors))
    assert native.error is None
    assert sorted(native.given) == sorted(tensors)
    values: dict[str, Tensor] = {}
    for role in ROLES:
        loaded = load(trio.role(role), tmp_path)
        assert loaded.error is None
        assert loaded.given == tuple(name for name in native.given if owner_of(name) == role)
        assert loaded.returned == {name for name in native.returned if owner_of(name) == role}
        values |= parameters_of(trio.role(role))
    expected = parameters_of(trio.native)
    assert not [name for name, value in expected.items() if value.isnan().any()]
    assert not [name for name, value in expected.items() if not torch.equal(value, values[name])]
    assert_stacked_as_in_the_checkpoint(trio.family, values, tensors)


def assert_stacked_as_in_the_checkpoint(family: Family, values: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Independent of how native vLLM stacks: the rows of each stack are those of its parts, in order."""

    def parts(prefix: str, *names: str) -> Tensor:
        return torch.cat([tensors[f"{prefix}.{name}.weight"] for name in names])

    for index in range(SIZE.layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        stacks: dict[str, Tensor] = {}
        if family.attention == "DeepseekAttention":
            stacks[f"{attention}.qkv_proj.weight"] = parts(attention, "q_proj", "k_proj", "v_proj")
        elif family.mla and f"{attention}.q_a_proj.weight" in tensors:
            stacks[f"{attention}.fused_qkv_a_proj.weight"] = parts(attention, "q_a_proj", "kv_a_proj_with_mqa")
        shared = mlp if index < DENSE_LAYERS else f"{mlp}.shared_experts"
        stacks[f"{shared}.gate_up_proj.weight"] = parts(shared, "gate_proj", "up_proj")
        if index >= DENSE_LAYERS:
            experts = [f"{mlp}.experts.{number}" for number in range(SIZE.experts)]
            routed = f"{mlp}.experts.routed_experts"
            stacks[f"{routed}.w13_weight"] = torch.stack([parts(each, "gate_proj", "up_proj") for each in experts])
            stacks[f"{routed}.w2_weight"] = torch.stack([tensors[f"{each}.down_proj.weight"] for each in experts])
        for name, stack in stacks.items():
            assert torch.equal(values[name], stack), name


def with_another_row(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:1]])


def without_a_row(tensor: Tensor) -> Tensor:
    return tensor[1:].clone()


def with_another_column(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., :1]], dim=-1)


RESHAPED = (with_another_row, without_a_row, with_another_column)
SURPLUS = (
    "lm_head.bias",
    "model.embed_tokens.extra",
    "model.norm.extra",
    "model.layers.0.input_layernorm.extra",
    "model.layers.0.self_attn.extra.weight",
    "model.layers.0.self_attn.o_proj.bias",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.mlp.extra.weight",
    "model.layers.0.mlp.down_proj.bias",
    "model.layers.0.mlp.gate_up_proj.weight",
    f"model.layers.{DENSE_LAYERS}.mlp.extra.weight",
    f"model.layers.{DENSE_LAYERS}.mlp.experts.{SIZE.experts}.down_proj.weight",
    f"model.layers.{DENSE_LAYERS}.mlp.shared_experts.extra.weight",
)
EXTRA = torch.zeros(4, 4, dtype=torch.bfloat16)


def damaged_ones(tensors: dict[str, Tensor]) -> Iterator[tuple[str, str, str, dict[str, Tensor]]]:
    """What was done, to which tensor, as one text too, and the checkpoint. One layer and one expert of a kind."""
    for name, tensor in tensors.items():
        if name.startswith(("model.layers.1.", f"model.layers.{DENSE_LAYERS}.self_attn.")):
            continue
        if ".experts." in name and ".experts.3." not in name:
            continue
        yield "missing", name, f"{name} missing", {other: each for other, each in tensors.items() if other != name}
        for reshape in RESHAPED[: 2 if tensor.ndim == 1 else 3]:
            yield "misshapen", name, f"{name} {reshape.__name__}", tensors | {name: reshape(tensor)}
    for name in SURPLUS:
        yield "surplus", name, f"{name} surplus", tensors | {name: EXTRA}


def test_a_damaged_tensor_is_its_owners_error_as_it_is_natives(trio: Trio, tmp_path: Path) -> None:
    wrong: list[str] = []
    loud = dict.fromkeys(("missing", "misshapen", "surplus"), 0)
    for kind, name, case, tensors in damaged_ones(random_tensors(trio.family)):
        write_tensors(tmp_path, tensors)
        owner = owner_of(name)
        native = load(trio.native, tmp_path)
        seen = {role: load(trio.role(role), tmp_path) for role in ROLES}
        for role, loaded in seen.items():
            if loaded.error != (native.error if role == owner else None):
                wrong.append(f"{case}: {role} says {loaded.error}, native {native.error}")
        if native.error is None and seen["attention"].returned | seen["ffn"].returned != native.returned:
            wrong.append(f"{case}: the roles loaded other parameters than native")
        if native.error is not None:
            loud[kind] += 1
            if kind != "misshapen" and name.removeprefix("model.") not in native.error[1] and "gate_up" not in name:
                wrong.append(f"{case}: not named in {native.error}")
    assert wrong == []
    assert all(loud.values()), loud


NATIVE_ERRORS = (
    (
        "model.layers.0.input_layernorm.weight",
        None,
        "attention",
        (
            "ValueError",
            "Following weights were not initialized from checkpoint: {'model.layers.0.input_layernorm.weight'}",
        ),
    ),
    (
        "model.norm.weight",
        (129,),
        "attention",
        ("AssertionError", "Attempted to load weight (torch.Size([129])) into parameter (torch.Size([128]))"),
    ),
    ("model.layers.0.self_attn.o_proj.weight", (129, 512), "attention", ("AssertionError", "")),
    ("model.layers.0.self_attn.extra.weight", (4, 4), "attention", ("KeyError", "'layers.0.self_attn.extra.weight'")),
    (
        "model.layers.2.mlp.gate.weight",
        (9, 128),
        "ffn",
        (
            "AssertionError",
            "Tried to load weights of size torch.Size([9, 128])to a parameter of size torch.Size([8, 128])",
        ),
    ),
    ("model.layers.0.mlp.extra.weight", (4, 4), "ffn", ("KeyError", "'layers.0.mlp.extra.weight'")),
    ("model.layers.2.mlp.gate.weight", None, "ffn", None),
    ("model.layers.0.self_attn.o_proj.weight", None, "attention", None),
)


@pytest.mark.parametrize(("name", "shape", "owner", "error"), NATIVE_ERRORS)
def test_what_the_errors_say(
    name: str, shape: tuple[int, ...] | None, owner: str, error: tuple[str, str] | None, tmp_path: Path
) -> None:
    """The full text, for one family; without a shape the tensor is missing."""
    family = FAMILIES[1]
    trio = build_trio(family, tmp_path)
    tensors = random_tensors(family)
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    write_tensors(tmp_path, tensors)
    assert load(trio.native, tmp_path).error == error
    assert {role: load(trio.role(role), tmp_path).error for role in ROLES} == {
        role: error if role == owner else None for role in ROLES
    }


@pytest.mark.parametrize("name", ["model.layers.0.extra.weight", "model.layers.0.mlpx.weight", "model.extra.weight"])
def test_a_surplus_tensor_that_nobody_owns_is_both_roles_error(name: str, tmp_path: Path) -> None:
    """Also one whose name merely begins like a module of the other role."""
    trio = build_trio(FAMILIES[1], tmp_path)
    write_tensors(tmp_path, random_tensors(trio.family) | {name: EXTRA})
    error = ("KeyError", repr(name.removeprefix("model.")))
    assert [load(built, tmp_path).error for built in (trio.native, trio.attention, trio.ffn)] == [error] * 3


def test_a_surplus_tensor_outside_the_model_names_the_class_that_has_no_such_module(tmp_path: Path) -> None:
    """Here the text differs from native vLLM's in the name of the class and the parameters that it lists after it."""
    trio = build_trio(FAMILIES[1], tmp_path)
    write_tensors(tmp_path, random_tensors(trio.family) | {"extra.weight": EXTRA})
    for built in (trio.native, trio.attention, trio.ffn):
        error = load(built, tmp_path).error
        assert error is not None
        assert error[0] == "ValueError"
        assert error[1].startswith(f"There is no module or parameter named 'extra' in {type(built.model).__name__}. ")
