"""Small checkpoints with seeded random weights, one per model family, written by transformers as published ones are.

Every tensor is random, biases, attention sinks and routers' corrections included: one that a role loses, or reads in
another's place, changes what the model answers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from demo.checkpoint import KV_RANK, NOPE, ROPE, SPECIAL, VALUE, Size, random_weight, write_tokenizer

SIZE = Size()
VECTOR_SPREAD = 0.1
"""Standard deviation of norms around 1, and of biases, sinks and corrections around 0."""
WINDOW = 128
"""Tokens that a layer with sliding attention sees, where the family has such layers."""

COMMON: dict[str, Any] = {
    "vocab_size": SIZE.vocabulary,
    "hidden_size": SIZE.hidden,
    "num_hidden_layers": SIZE.layers,
    "num_attention_heads": SIZE.heads,
    "num_key_value_heads": 2,
    "intermediate_size": SIZE.dense_intermediate,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": SIZE.context,
    "tie_word_embeddings": False,
    "bos_token_id": SPECIAL.index("<s>"),
    "eos_token_id": SPECIAL.index("</s>"),
    "pad_token_id": None,
}
HEAD = {"head_dim": 80}
"""Not a multiple of 32. Where it is, vLLM's bf16 attention uses a CPU's AMX without asking the kernel for it: the
worker ends with an illegal instruction, split or not, unless another operator happened to ask before (0.32.0)."""
HEAD_OF_HIDDEN = {"hidden_size": 160, "num_attention_heads": 2}
"""The same head size for families that have no `head_dim`."""
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_PARTIAL_ROPE = {**ROTARY, "partial_rotary_factor": 0.4}
"""32 dimensions of a head: the CPU's rotary kernel writes multiples of 16, past the end of what is rotated."""
LATENT = {
    "num_key_value_heads": SIZE.heads,
    "kv_lora_rank": KV_RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
}
EXPERTS = {"num_experts": SIZE.experts, "moe_intermediate_size": SIZE.expert_intermediate}
LOCAL_EXPERTS = {"num_local_experts": SIZE.experts}
GROUPED = {
    "n_routed_experts": SIZE.experts,
    "moe_intermediate_size": SIZE.expert_intermediate,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": SIZE.expert_intermediate}
_SHARED_MLP = {"shared_intermediate_size": SIZE.expert_intermediate}
_GRANITE = {
    **HEAD_OF_HIDDEN,
    **LOCAL_EXPERTS,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.15,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, by transformers' `model_type`, and its configuration where it is not the common one."""

    name: str
    config: dict[str, Any]
    architecture: str = ""
    """What published checkpoints name, where transformers writes another name."""


FAMILIES = (
    Family("deepseek_v2", {**LATENT, **GROUPED, "q_lora_rank": None, "topk_method": "greedy"}),
    Family(
        "deepseek_v3",
        {
            **LATENT,
            **GROUPED,
            "q_lora_rank": 96,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    Family("qwen3_moe", {**HEAD, **EXPERTS, "mlp_only_layers": [1]}),
    Family("mixtral", {**HEAD, **LOCAL_EXPERTS}),
    Family(
        "glm4_moe",
        {**HEAD, **GROUPED, "use_qk_norm": True, "attention_bias": True, "rope_parameters": _PARTIAL_ROPE},
    ),
    Family(
        "gpt_oss",
        {
            **HEAD,
            **LOCAL_EXPERTS,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": SIZE.context // 4,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    Family("olmoe", {**HEAD_OF_HIDDEN, "num_experts": SIZE.experts}),
    Family("qwen2_moe", {**HEAD_OF_HIDDEN, **EXPERTS, **SHARED_EXPERT, "mlp_only_layers": [1]}),
    Family("granitemoe", {**_GRANITE, "logits_scaling": 1.2}),
    Family("granitemoeshared", {**_GRANITE, **_SHARED_MLP}),
    # Attention layers only: vLLM 0.32.0's Mamba2 mixer fails on the CPU.
    Family(
        "granitemoehybrid",
        {
            **_GRANITE,
            **_SHARED_MLP,
            "layer_types": ["attention"] * SIZE.layers,
            "mamba_n_heads": 8,
            "mamba_d_head": 40,
        },
    ),
    Family(
        "ernie4_5_moe",
        {
            **HEAD,
            "moe_num_experts": SIZE.experts,
            "moe_intermediate_size": SIZE.expert_intermediate,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
    Family(
        "exaone_moe",
        {**HEAD, **GROUPED, "num_experts": SIZE.experts, "num_shared_experts": 1, "sliding_window": WINDOW},
    ),
    Family(
        "afmoe",
        {
            **HEAD,
            **EXPERTS,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "sliding_window": WINDOW,
            "score_func": "sigmoid",
            "route_norm": True,
            "route_scale": 2.0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Family("glm4_moe_lite", {**LATENT, **GROUPED, "q_lora_rank": 96, "topk_method": "noaux_tc"}),
    Family(
        "llama4_text",
        {
            **HEAD,
            **LOCAL_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size": SIZE.expert_intermediate,
            "intermediate_size_mlp": SIZE.dense_intermediate,
            "interleave_moe_layer_step": 2,
        },
    ),
    Family(
        "lfm2_moe",
        {
            **HEAD_OF_HIDDEN,
            **EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"] * (SIZE.layers // 2),
            "norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "qwen3_next",
        {
            **HEAD,
            **EXPERTS,
            **SHARED_EXPERT,
            "rope_parameters": _PARTIAL_ROPE,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    Family(
        "cohere2_moe",
        {
            **HEAD,
            **EXPERTS,
            "num_local_experts": SIZE.experts,
            "logit_scale": 0.3,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    # MoE layers only: vLLM wants a norm of dense ones that transformers has not.
    Family(
        "axk1",
        {**LATENT, **GROUPED, "q_lora_rank": 96, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    ),
    Family(
        "hy_v3",
        {
            **HEAD,
            **EXPERTS,
            "expert_hidden_dim": SIZE.expert_intermediate,
            "first_k_dense_replace": 1,
            "route_norm": True,
            "qk_norm": True,
        },
    ),
    # Attention layers only: the kernels of vLLM's Mamba mixer need Triton.
    Family("jamba", {**HEAD_OF_HIDDEN, "num_experts": SIZE.experts, "attn_layer_period": 1, "attn_layer_offset": 0}),
    Family(
        "mimo_v2_flash",
        {
            **HEAD,
            **GROUPED,
            "v_head_dim": 80,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * (SIZE.layers // 2),
            "hybrid_layer_pattern": [0, 1] * (SIZE.layers // 2),
            "moe_layer_freq": [0, *[1] * (SIZE.layers - 1)],
            "layernorm_epsilon": 1e-6,
            "swa_num_attention_heads": SIZE.heads,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 80,
            "swa_v_head_dim": 80,
            "sliding_window_size": WINDOW,
            "add_swa_attention_sink_bias": True,
            "partial_rotary_factor": 0.4,
            "rope_parameters": {"full_attention": _PARTIAL_ROPE, "sliding_attention": _PARTIAL_ROPE},
        },
    ),
    # Dense, as published.
    Family(
        "minicpm3",
        {
            **HEAD_OF_HIDDEN,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 32,
            "v_head_dim": 80,
        },
    ),
    Family("granitemoe_swa", {**_GRANITE, **_SHARED_MLP, "sliding_window": WINDOW}),
    Family(
        "phimoe",
        {**HEAD_OF_HIDDEN, **LOCAL_EXPERTS, "lm_head_bias": True, "attention_bias": True},
        "PhiMoEForCausalLM",
    ),
)

_OF_TORCH = "both roles build the norms that are of a class of torch's"
BROKEN = {"phimoe": _OF_TORCH}
"""Families whose wrappers do not hold yet what their proof says, and why."""


def write_checkpoint(folder: Path, family: Family, seed: int = 0) -> Path:
    """Write config, tokenizer and bf16 weights; return the folder."""
    model = _model_of(family)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        tensor.copy_(_random(name, tensor, generator))
    model.save_pretrained(folder)
    _name_architecture(folder, family, model)
    write_tokenizer(folder, SIZE)
    return folder


def write_config(folder: Path, family: Family) -> Path:
    """Write the config alone; return the folder."""
    with torch.device("meta"):
        model = _model_of(family)
    model.config.save_pretrained(folder)
    _name_architecture(folder, family, model)
    return folder


def _model_of(family: Family) -> Any:
    config = AutoConfig.for_model(family.name, **{**COMMON, **family.config})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _name_architecture(folder: Path, family: Family, model: Any) -> None:
    file = folder / "config.json"
    named = {"architectures": [family.architecture or type(model).__name__]}
    file.write_text(json.dumps(json.loads(file.read_text()) | named, indent=1))


def _random(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    is_matrix = tensor.ndim > 1 and not name.endswith("bias")
    if is_matrix:
        return random_weight(name, tuple(tensor.shape), generator)
    spread = torch.empty(tensor.shape).normal_(0.0, VECTOR_SPREAD, generator=generator)
    is_norm = name.endswith(".weight") and "norm" in name.split(".")[-2]
    return spread + 1.0 if is_norm else spread
