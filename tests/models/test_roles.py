"""Both roles of every family that vLLM builds on the CPU: each parameter of upstream's model has one owner.

Upstream's own constructors build them, without weights, and so also families that the CPU cannot serve. Not built by
vLLM 0.32.0 on the CPU are nemotron_h ("is_act_and_mul=False is supported only for CUDA, XPU and ROCm"), the sparse
attention of deepseek_v32 and glm_moe_dsa, and, without torchvision, qwen3_5 and qwen3_vl_moe.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from tests.in_process import without_inspection, world_of_one
from tests.models.checkpoints import (
    BROKEN,
    COMMON,
    EXPERTS,
    FAMILIES,
    GROUPED,
    HEAD,
    HEAD_OF_HIDDEN,
    LATENT,
    LOCAL_EXPERTS,
    ROTARY,
    SHARED_EXPERT,
    SIZE,
    Family,
    write_config,
)

Parameters = dict[str, torch.Size]

_BAILING = {
    **HEAD,
    **EXPERTS,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": SIZE.expert_intermediate,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "embedding_dropout": 0.0,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": ROTARY,
    "n_group": 4,
    "topk_group": 2,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
}
_BAILING_LATENT = {**_BAILING, **LATENT, "q_lora_rank": 96, "head_dim": 128, "layer_group_size": 2}
_STEP = {
    **HEAD,
    "moe_num_experts": SIZE.experts,
    "moe_top_k": 2,
    "moe_intermediate_size": SIZE.expert_intermediate,
    "share_expert_dim": SIZE.expert_intermediate,
    "norm_expert_weight": True,
    "moe_layers_enum": "1,2,3",
}
UNSERVED = (
    Family("bailing_moe", {**_BAILING, "n_group": None, "score_function": None}, "BailingMoeForCausalLM"),
    Family("bailing_moe_v2", _BAILING, "BailingMoeV2ForCausalLM"),
    Family("bailing_moe_linear", {**_BAILING_LATENT, "group_norm_size": 1}, "BailingMoeV2_5ForCausalLM"),
    Family(
        "bailing_moe_v3",
        {**_BAILING_LATENT, "short_conv_kernel_size": 4, "no_kda_lora": True},
        "BailingMoeV3ForCausalLM",
    ),
    # vLLM 0.32.0 cannot load it: its loader looks for the experts' parameters where they were in earlier releases.
    Family(
        "dbrx",
        {
            **HEAD_OF_HIDDEN,
            "d_model": HEAD_OF_HIDDEN["hidden_size"],
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": SIZE.expert_intermediate,
                "moe_num_experts": SIZE.experts,
                "moe_top_k": 2,
            },
        },
        "DbrxForCausalLM",
    ),
    Family(
        "deepseek",
        {**HEAD, **GROUPED, "hidden_act": "silu", "norm_topk_prob": False, "rope_parameters": ROTARY},
        "DeepseekForCausalLM",
    ),
    Family(
        "k2_horizon",
        {
            **HEAD,
            **EXPERTS,
            "num_shared_experts": 1,
            "attention_bias": False,
            "attention_gate_func": None,
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "layernorm_num_groups": 1,
            "mlp_only_layers": [0],
            "moe_gate_bias": True,
            "mova_num_experts": 0,
            "mova_num_experts_per_tok": 0,
            "norm_topk_prob": True,
            "query_key_norm": True,
            "rope_head_dim": HEAD["head_dim"],
            "router_scaling_factor": 1.0,
            "router_score_func": "sigmoid",
            "rope_parameters": ROTARY,
        },
        "K2HorizonForCausalLM",
    ),
    Family(
        "laguna",
        {**HEAD, **EXPERTS, **SHARED_EXPERT, "num_attention_heads_per_layer": [SIZE.heads] * SIZE.layers},
        "LagunaForCausalLM",
    ),
    Family(
        "minicpm",
        {
            **HEAD,
            "num_experts": SIZE.experts,
            "hidden_act": "silu",
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 64,
            "rope_parameters": ROTARY,
        },
        "MiniCPMForCausalLM",
    ),
    Family(
        "minimax_m2",
        {**HEAD, **LOCAL_EXPERTS, "rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
        "MiniMaxM2ForCausalLM",
    ),
    Family("param2moe", _BAILING, "Param2MoEForCausalLM"),
    Family("sarvam_moe", _BAILING, "SarvamMoEForCausalLM"),
    Family("sarvam_mla", {**_BAILING, **LATENT, "q_lora_rank": 96}, "SarvamMLAForCausalLM"),
    Family("step3_text", {**_STEP, "share_q_dim": 96, "max_position_embedding": SIZE.context}, "Step3TextForCausalLM"),
    Family(
        "step3p5",
        {
            **_STEP,
            "num_attention_groups": 2,
            "use_head_wise_attn_gate": True,
            "layer_types": ["full_attention"] * SIZE.layers,
            "sliding_window": None,
        },
        "Step3p5ForCausalLM",
    ),
)
"""Not in the matrix: transformers has no model to write a checkpoint with, or the CPU cannot route as they do."""
OF_VLLM = frozenset({"step3_text", "step3p5"})
"""Configurations that vLLM brings; others that transformers has not come with their checkpoints, as code."""


def families() -> Iterator[object]:
    for family in (*FAMILIES, *UNSERVED):
        reason = BROKEN.get(family.name)
        marks = pytest.mark.xfail(reason=reason, strict=True) if reason else ()
        yield pytest.param(family, id=family.name, marks=marks)


@pytest.fixture(scope="module", autouse=True)
def vllm_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with world_of_one(tmp_path_factory.mktemp("distributed")):
        yield


@pytest.mark.parametrize("family", [*families()])
def test_each_parameter_has_one_owner(family: Family, tmp_path: Path) -> None:
    config = write_config(tmp_path, family) if family in FAMILIES else _write_own(tmp_path, family)
    without_inspection(json.loads((config / "config.json").read_text())["architectures"][0])
    native, attention, ffn = (_parameters(config, role) for role in (None, "attention", "ffn"))
    assert attention
    assert ffn
    assert attention | ffn == native
    assert attention.keys() & ffn.keys() == set()


def _write_own(folder: Path, family: Family) -> Path:
    if family.name not in OF_VLLM and family.name not in CONFIG_MAPPING:
        own = type(family.name, (PretrainedConfig,), {"model_type": family.name})
        AutoConfig.register(family.name, own, exist_ok=True)
    named = {"model_type": family.name, "architectures": [family.architecture]}
    (folder / "config.json").write_text(json.dumps({**COMMON, **family.config, **named}))
    return folder


def _parameters(folder: Path, role: Literal["attention", "ffn"] | None) -> Parameters:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils as upstream_utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    # vLLM remembers the stand-ins of a model by its id(), which a later model may have again.
    upstream_utils._model_to_pp_missing_layer_names.clear()
    settings: dict[str, Any] = {"afd": {"role": role}} if role else {}
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=SIZE.context,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**26,
        additional_config=settings,
    ).create_engine_config()
    with set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}
