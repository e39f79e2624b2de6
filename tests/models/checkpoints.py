"""Small checkpoints with seeded random weights, one per model family, written by transformers as published ones are.

Every tensor is random, biases, attention sinks and routers' corrections included: one that a role loses, or reads in
another's place, changes what the model answers.
"""

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

_COMMON: dict[str, Any] = {
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
_HEAD = {"head_dim": 80}
"""Not a multiple of 32. Where it is, vLLM's bf16 attention uses a CPU's AMX without asking the kernel for it: the
worker ends with an illegal instruction, split or not, unless another operator happened to ask before (0.32.0)."""
_HEAD_OF_HIDDEN = {"hidden_size": 160, "num_attention_heads": 2}
"""The same head size for families that have no `head_dim`."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PARTIAL_ROPE = {**_ROPE, "partial_rotary_factor": 0.4}
"""32 dimensions of a head: the CPU's rotary kernel writes multiples of 16, past the end of what is rotated."""
_LATENT = {
    "num_key_value_heads": SIZE.heads,
    "kv_lora_rank": KV_RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
}
_EXPERTS = {"num_experts": SIZE.experts, "moe_intermediate_size": SIZE.expert_intermediate}
_LOCAL_EXPERTS = {"num_local_experts": SIZE.experts}
_GROUPED = {
    "n_routed_experts": SIZE.experts,
    "moe_intermediate_size": SIZE.expert_intermediate,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": SIZE.expert_intermediate}
_SHARED_MLP = {"shared_intermediate_size": SIZE.expert_intermediate}
_GRANITE = {
    **_HEAD_OF_HIDDEN,
    **_LOCAL_EXPERTS,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.15,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, by transformers' `model_type`, and its configuration where it is not the common one."""

    name: str
    config: dict[str, Any]


FAMILIES = (
    Family("deepseek_v2", {**_LATENT, **_GROUPED, "q_lora_rank": None, "topk_method": "greedy"}),
    Family(
        "deepseek_v3",
        {
            **_LATENT,
            **_GROUPED,
            "q_lora_rank": 96,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    Family("qwen3_moe", {**_HEAD, **_EXPERTS, "mlp_only_layers": [1]}),
    Family("mixtral", {**_HEAD, **_LOCAL_EXPERTS}),
    Family(
        "glm4_moe",
        {**_HEAD, **_GROUPED, "use_qk_norm": True, "attention_bias": True, "rope_parameters": _PARTIAL_ROPE},
    ),
    Family(
        "gpt_oss",
        {
            **_HEAD,
            **_LOCAL_EXPERTS,
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
    Family("olmoe", {**_HEAD_OF_HIDDEN, "num_experts": SIZE.experts}),
    Family("qwen2_moe", {**_HEAD_OF_HIDDEN, **_EXPERTS, **_SHARED_EXPERT, "mlp_only_layers": [1]}),
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
            **_HEAD,
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
        {**_HEAD, **_GROUPED, "num_experts": SIZE.experts, "num_shared_experts": 1, "sliding_window": WINDOW},
    ),
    Family(
        "afmoe",
        {
            **_HEAD,
            **_EXPERTS,
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
    Family("glm4_moe_lite", {**_LATENT, **_GROUPED, "q_lora_rank": 96, "topk_method": "noaux_tc"}),
    Family(
        "llama4_text",
        {
            **_HEAD,
            **_LOCAL_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size": SIZE.expert_intermediate,
            "intermediate_size_mlp": SIZE.dense_intermediate,
            "interleave_moe_layer_step": 2,
        },
    ),
    Family(
        "lfm2_moe",
        {
            **_HEAD_OF_HIDDEN,
            **_EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"] * (SIZE.layers // 2),
            "norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "qwen3_next",
        {
            **_HEAD,
            **_EXPERTS,
            **_SHARED_EXPERT,
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
            **_HEAD,
            **_EXPERTS,
            "num_local_experts": SIZE.experts,
            "logit_scale": 0.3,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
)


def write_checkpoint(folder: Path, family: Family, seed: int = 0) -> Path:
    """Write config, tokenizer and bf16 weights; return the folder."""
    config = AutoConfig.for_model(family.name, **{**_COMMON, **family.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        tensor.copy_(_random(name, tensor, generator))
    model.save_pretrained(folder)
    write_tokenizer(folder, SIZE)
    return folder


def _random(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    is_matrix = tensor.ndim > 1 and not name.endswith("bias")
    if is_matrix:
        return random_weight(name, tuple(tensor.shape), generator)
    spread = torch.empty(tensor.shape).normal_(0.0, VECTOR_SPREAD, generator=generator)
    return spread + 1.0 if name.endswith("norm.weight") else spread
