"""A vision-language model around a registered one, really built and run: towers and the outer model are Attention's.

Its inner model is split by that model's own wrapper; text and an image give the unsplit model's answer to the last bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.models.utils import StageMissingLayer

from afd_generated.vllm_0_32_0 import deepseek_v2 as inner
from afd_generated.vllm_0_32_0 import kimi_vl as emitted
from afd_runtime import parts
from afd_runtime.errors import WrapperError
from afd_runtime.split import NothingSplitError
from tests.proof.families import AROUND, IMAGE_TOKEN, SIZE, write_config
from tests.proof.models import BATCHES, Built, Models, build, build_all, exchange_in_process, fill_caches, finish
from tests.proof.models import forward_context as context
from tests.proof.test_numeric import differing, run_model

SIDE = 4
"""Patches of the image in each direction; 2 by 2 become one token."""
TOWERS = ("vision_tower.", "multi_modal_projector.")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return build_all(AROUND, tmp_path_factory.mktemp("config"), torch.bfloat16)


def test_both_parts_are_the_roles(models: Models) -> None:
    attention, ffn = models.attention.model, models.ffn.model
    assert type(attention) is emitted.AttentionKimiVLForConditionalGeneration
    assert type(ffn) is emitted.FFNKimiVLForConditionalGeneration
    assert type(attention.language_model) is inner.AttentionDeepseekV2ForCausalLM
    assert type(ffn.language_model) is inner.FFNDeepseekV2ForCausalLM


def test_each_weight_has_one_owner_and_the_ffn_builds_no_tower(models: Models) -> None:
    names = [
        {name for name, _ in built.model.named_parameters()} for built in (models.native, models.attention, models.ffn)
    ]
    native, attention, ffn = names
    assert attention | ffn == native
    assert attention & ffn == set()
    assert {name for name in native if name.startswith(TOWERS)} <= attention
    assert all(name.startswith("language_model.model.layers.") and ".mlp." in name for name in ffn)
    assert isinstance(models.ffn.model.vision_tower, StageMissingLayer)
    assert models.ffn.config.model_config.multimodal_config.language_model_only
    assert not models.attention.config.model_config.multimodal_config.language_model_only


def test_each_role_loads_its_own_weights(models: Models) -> None:
    """In the checkpoint's own names, through upstream's loader of the outer and of the inner model."""
    generator = torch.Generator().manual_seed(2)
    plain = {
        name: torch.randn(tensor.shape, generator=generator).to(torch.bfloat16)
        for name, tensor in models.native.model.named_parameters()
        if not any(part in name for part in ("gate_up_proj", "w13", "w2_weight"))
    }
    for built in (models.native, models.attention, models.ffn):
        loaded = built.model.load_weights(plain.items())
        own = dict(built.model.named_parameters())
        assert loaded == plain.keys() & own.keys()
        assert [name for name in loaded if not torch.equal(own[name].data, plain[name])] == []


def test_text_and_image_are_bitwise_the_unsplit_models(tmp_path: Path) -> None:
    models = build_all(AROUND, tmp_path, torch.bfloat16)
    finish(models)
    exchange_in_process(models)
    for batch in BATCHES.values():
        assert differing(run_model(models.attention, batch), run_model(models.native, batch)) == []
    seen = run_with_image(models.attention, pixels(seed=1))
    assert differing(seen, run_with_image(models.native, pixels(seed=1))) == []
    assert "hidden_states" in differing(seen, run_with_image(models.native, pixels(seed=2)))


def pixels(seed: int) -> Tensor:
    values = torch.randn(SIDE * SIDE, 3, 14, 14, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


def run_with_image(built: Built, image: Tensor) -> dict[str, Tensor]:
    batch = BATCHES["64 tokens, a prefill"]
    fill_caches(built.config)
    token_ids = torch.arange(batch.tokens) * 7 % SIZE.vocabulary
    token_ids[10 : 10 + SIDE * SIDE // 4] = IMAGE_TOKEN
    is_image = torch.zeros(batch.tokens, dtype=torch.bool)
    is_image[10 : 10 + SIDE * SIDE // 4] = True
    with torch.no_grad(), context(built.config, batch):
        found = built.model.embed_multimodal(pixel_values=image, image_grid_hws=torch.tensor([[SIDE, SIDE]]))
        embedded = built.model.embed_input_ids(token_ids, found, is_multimodal=is_image)
        hidden = built.model(None, batch.positions(), inputs_embeds=embedded)
        return {"image": found[0], "hidden_states": hidden, "logits": built.model.compute_logits(hidden)}


def test_an_inner_model_without_a_wrapper_is_an_error_that_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    def none(role: str, native: str) -> str:
        raise WrapperError(f"afd: no model spec names {native}")

    write_config(tmp_path, AROUND)
    monkeypatch.setattr(parts, "role_alias", none)
    with pytest.raises(NothingSplitError) as error:
        build(AROUND, tmp_path, torch.bfloat16, "attention")
    assert str(error.value) == (
        "afd: AttentionKimiVLForConditionalGeneration built no split layer; afd: no model spec names "
        "DeepseekV2ForCausalLM; do: report this model to afd-compiler"
    )
