"""Upstream's layer and the emitted pair, really constructed and run by the installed vLLM: equal to the last bit.

Independent of fx and of the compiler. The exchange runs in the process: the link keeps what the attention layer sends,
and answers with what the FFN layer makes of it. Attention is real: each layer has a KV cache with random content and
the metadata that its backend's builder makes of a batch of decodes and prefills (CPU_ATTN for multi-head attention,
CPU_MLA for latent attention; without metadata vLLM's CPU_ATTN leaves its output uninitialised). Besides what a layer
returns, what it does to its arguments and to the cache is compared, because its norms and its fp16 rescale work in
place.

One rank only: the variants with sequence-parallel MoE need several, and V3.2's sparse attention needs a GPU.
"""

import hashlib
import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor
from vllm.model_executor.models import deepseek_v2 as upstream

from afd_generated.vllm_0_32_0 import deepseek_v2 as emitted
from afd_runtime.manifest import read_manifest
from tests.proof.families import DENSE_LAYERS, FAMILIES, SIZE, Family
from tests.proof.models import (
    BATCHES,
    Batch,
    Built,
    Models,
    attention_modules,
    build_all,
    exchange_in_process,
    fill_caches,
    finish,
    forward_context,
    random_hidden,
)

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def run_layer(built: Built, index: int, batch: Batch, *, residual: bool, scaling: bool = False) -> dict[str, Tensor]:
    """Everything that a layer returns or changes. `scaling` is of queries, as Mistral Large 3 wants it."""
    dtype = built.config.model_config.dtype
    hidden = random_hidden(batch.tokens, dtype, seed=3)
    added = random_hidden(batch.tokens, dtype, seed=4) if residual else None
    positions = batch.positions()
    scales = upstream._get_llama_4_scaling(8, 0.5, positions) if scaling else None
    fill_caches(built.config)
    with torch.no_grad(), forward_context(built.config, batch):
        result, result_residual = built.layer(index)(positions, hidden, added, scales)
    seen = {"hidden_states": result, "residual": result_residual, "argument hidden_states": hidden}
    if added is not None:
        seen["argument residual"] = added
    return seen | {f"cache of {name}": layer.kv_cache for name, layer in attention_modules(built.config).items()}


def run_model(built: Built, batch: Batch) -> dict[str, Tensor]:
    fill_caches(built.config)
    token_ids = torch.arange(batch.tokens) * 7 % SIZE.vocabulary
    with torch.no_grad(), forward_context(built.config, batch):
        hidden = built.model(token_ids, batch.positions())
        return {"hidden_states": hidden, "logits": built.model.compute_logits(hidden)}


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal; a NaN or an infinity counts as different."""
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not (same_bits(tensor, theirs[name]) and tensor.isfinite().all())]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Unlike `torch.equal` tells 0.0 from -0.0."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_upstreams_layer_and_the_emitted_pair_are_bitwise_equal(
    family: Family, dtype: torch.dtype, tmp_path: Path
) -> None:
    models = build_all(family, tmp_path, dtype)
    finish(models)
    exchange = exchange_in_process(models)
    assert_is_what_it_says(family, models)
    wrong: list[str] = []
    cases = 0
    for name, batch in BATCHES.items():
        for index in range(SIZE.layers):
            for residual, scaling in ((False, False), (True, False), (True, True)):
                exchange.hops.clear()
                native = run_layer(models.native, index, batch, residual=residual, scaling=scaling)
                assert exchange.hops == []
                split = run_layer(models.attention, index, batch, residual=residual, scaling=scaling)
                assert exchange.hops == [("send", index, index == 0), ("recv", index, False)]
                case = f"layer {index}, {residual=}, {scaling=}, {name}"
                wrong += [f"{case}: {each}" for each in differing(split, native)]
                cases += 1
        whole = run_model(models.attention, batch)
        wrong += [f"model, {name}: {each}" for each in differing(whole, run_model(models.native, batch))]
    assert wrong == []
    assert cases == 27


def assert_is_what_it_says(family: Family, models: Models) -> None:
    """The reference is upstream's untouched source; the pair is the emitted one; both have the variants meant here."""
    manifest = read_manifest(Path(emitted.__file__).with_suffix(".json"))
    source = Path(inspect.getfile(upstream)).read_bytes()
    assert hashlib.sha256(source).hexdigest() == manifest.sources[manifest.layers[0].source]
    assert type(models.native.model) is getattr(upstream, family.architecture)
    for built, kind in (
        (models.native, upstream.DeepseekV2DecoderLayer),
        (models.attention, emitted.AttentionDeepseekV2DecoderLayer),
        (models.ffn, emitted.FFNDeepseekV2DecoderLayer),
    ):
        assert {type(layer) for layer in built.model.model.layers} == {kind}
    for index in range(SIZE.layers):
        mlp = upstream.DeepseekV2MLP if index < DENSE_LAYERS else upstream.DeepseekV2MoE
        attention = getattr(upstream, family.attention)
        native, ours, theirs = (built.layer(index) for built in (models.native, models.attention, models.ffn))
        assert (type(native.self_attn), type(native.mlp)) == (attention, mlp)
        assert (type(ours.self_attn), type(ours.mlp)) == (attention, emitted.RemoteMlp)
        assert (type(theirs.self_attn), type(theirs.mlp)) == (emitted.Unowned, mlp)


WEIGHTS = {"dense": (1, "mlp.down_proj.weight"), "moe": (2, "w2_weight")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_one_weight_off_by_one_ulp_is_seen(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The comparison above can fail: here it must."""
    index, suffix = WEIGHTS[kind]
    models = build_all(FAMILIES[0], tmp_path, dtype)
    (weight,) = (value for name, value in models.ffn.layer(index).named_parameters() if name.endswith(suffix))
    largest = weight.data.abs().argmax()  # so that the change outlives the rounding of a sum
    element = weight.data.view(-1)[largest : largest + 1]
    element.copy_(torch.nextafter(element, torch.full_like(element, torch.inf)))
    finish(models)
    exchange_in_process(models)
    batch = BATCHES["64 tokens, a prefill"]
    native, split = (run_layer(built, index, batch, residual=True) for built in (models.native, models.attention))
    assert differing(split, native) == ["hidden_states"]


def test_an_fp16_rescale_left_out_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices a statement that the emitted layer lacks, too."""
    models = build_all(FAMILIES[1], tmp_path, torch.float16)
    finish(models)
    exchange_in_process(models)
    monkeypatch.setattr(
        emitted.FFNDeepseekV2DecoderLayer, "forward", lambda self, hidden_states: self.mlp(hidden_states)
    )
    batch = BATCHES["64 tokens, a prefill"]
    native, split = (run_layer(built, 1, batch, residual=True) for built in (models.native, models.attention))
    assert differing(split, native) == ["hidden_states"]
