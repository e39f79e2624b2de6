"""What speculative decoding asks of a split model: hidden states for Eagle3 are Attention's; a draft is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.interfaces import supports_eagle3

from tests.proof.families import FAMILIES, SIZE, Family, write_config
from tests.proof.models import (
    BATCHES,
    Batch,
    Built,
    build_all,
    exchange_in_process,
    fill_caches,
    finish,
    forward_context,
)
from tests.proof.test_numeric import differing

DRAFTS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
}


def run_with_auxiliary(built: Built, batch: Batch) -> dict[str, Tensor]:
    fill_caches(built.config)
    token_ids = torch.arange(batch.tokens) * 7 % SIZE.vocabulary
    with torch.no_grad(), forward_context(built.config, batch):
        hidden, auxiliary = built.model(token_ids, batch.positions())
    return {"hidden_states": hidden} | {f"before layer {index}": value for index, value in enumerate(auxiliary, 1)}


@pytest.mark.parametrize("family", FAMILIES[1:3], ids=lambda family: family.name)
def test_hidden_states_for_eagle3_are_bitwise_the_unsplit_models(family: Family, tmp_path: Path) -> None:
    models = build_all(family, tmp_path, torch.bfloat16)
    finish(models)
    exchange_in_process(models)
    for built in (models.native, models.attention):
        assert supports_eagle3(built.model)
        built.model.set_aux_hidden_state_layers((1, 2))
    for batch in BATCHES.values():
        seen = run_with_auxiliary(models.attention, batch)
        assert list(seen) == ["hidden_states", "before layer 1", "before layer 2"]
        assert differing(seen, run_with_auxiliary(models.native, batch)) == []


@pytest.mark.parametrize("role", ["attention", "ffn"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_is_refused_when_the_configuration_is_made(draft: str, role: str, tmp_path: Path) -> None:
    """Before any process of the engine is started, and so before any weight is read; the folder holds none."""
    v3 = FAMILIES[3]
    config = write_config(tmp_path, v3) / "config.json"
    config.write_text(config.read_text().replace("{", '{\n "num_nextn_predict_layers": 1,', 1))
    arguments = EngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        max_model_len=128,
        speculative_config=DRAFTS[draft],
        additional_config={"afd": {"role": role}},
    )
    with pytest.raises(ValueError, match="start without --speculative-config") as error:
        arguments.create_engine_config()
    assert (
        "afd: speculative_config: it is set, which AFD does not support yet; start without --speculative-config"
        in str(error.value)
    )
