"""The members of the DeepSeek family that vLLM 0.32.0 builds on the CPU, as small configurations and checkpoints.

DeepSeek-V3.2 and GLM-MoE-DSA are not among them: "Sparse Attention is not supported on CPU".
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from demo.checkpoint import KV_RANK, NOPE, ROPE, VALUE, Shape, Size, config_of, random_weight, swiglu_shapes

SIZE = Size(layers=3, experts=8)
"""Layer 0 is dense and the first, layer 1 is dense, layer 2 is MoE."""
DENSE_LAYERS = 2
Q_RANK = 96


class DeepseekConfig(PretrainedConfig):
    """DeepSeek V1's, which its checkpoints bring as code of their own."""

    model_type = "deepseek"


AutoConfig.register(DeepseekConfig.model_type, DeepseekConfig, exist_ok=True)

_COMMON: dict[str, Any] = {"first_k_dense_replace": DENSE_LAYERS, "routed_scaling_factor": 4.0}
_LATENT = frozenset({"q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"})
"""Keys that DeepSeek V1 has not."""
_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": Q_RANK,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One way to build the decoder layer: a configuration, and whether multi-head latent attention is used."""

    name: str
    architecture: str
    attention: str
    """Name of upstream's attention class."""
    changes: dict[str, Any]
    """Against the demo's DeepSeek-V2."""

    @property
    def mla(self) -> bool:
        return self.attention == "DeepseekV2MLAAttention"

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        changed = {**config_of(SIZE), **_COMMON, **self.changes, "architectures": [self.architecture]}
        left_out = _LATENT if self.attention == "DeepseekAttention" else frozenset()
        return {key: value for key, value in changed.items() if key not in left_out}

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of a whole checkpoint's tensors."""
        yield "model.embed_tokens.weight", (SIZE.vocabulary, SIZE.hidden)
        yield "model.norm.weight", (SIZE.hidden,)
        yield "lm_head.weight", (SIZE.vocabulary, SIZE.hidden)
        for index in range(SIZE.layers):
            layer = f"model.layers.{index}"
            yield f"{layer}.input_layernorm.weight", (SIZE.hidden,)
            yield f"{layer}.post_attention_layernorm.weight", (SIZE.hidden,)
            yield from self._attention_shapes(f"{layer}.self_attn")
            yield from self._ffn_shapes(f"{layer}.mlp", dense=index < DENSE_LAYERS)

    def _attention_shapes(self, attention: str) -> Iterator[tuple[str, Shape]]:
        if self.attention == "DeepseekAttention":
            for name in "qkvo":
                yield f"{attention}.{name}_proj.weight", (SIZE.hidden, SIZE.hidden)
            return
        query = SIZE.heads * (NOPE + ROPE)
        if self.config()["q_lora_rank"]:
            yield f"{attention}.q_a_proj.weight", (Q_RANK, SIZE.hidden)
            yield f"{attention}.q_a_layernorm.weight", (Q_RANK,)
            yield f"{attention}.q_b_proj.weight", (query, Q_RANK)
        else:
            yield f"{attention}.q_proj.weight", (query, SIZE.hidden)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, SIZE.hidden)
        yield f"{attention}.kv_a_layernorm.weight", (KV_RANK,)
        yield f"{attention}.kv_b_proj.weight", (SIZE.heads * (NOPE + VALUE), KV_RANK)
        yield f"{attention}.o_proj.weight", (SIZE.hidden, SIZE.heads * VALUE)

    def _ffn_shapes(self, mlp: str, *, dense: bool) -> Iterator[tuple[str, Shape]]:
        if dense:
            yield from swiglu_shapes(mlp, SIZE.hidden, SIZE.dense_intermediate)
            return
        yield f"{mlp}.gate.weight", (SIZE.experts, SIZE.hidden)
        if self.config()["topk_method"] == "noaux_tc":
            yield f"{mlp}.gate.e_score_correction_bias", (SIZE.experts,)
        for expert in range(SIZE.experts):
            yield from swiglu_shapes(f"{mlp}.experts.{expert}", SIZE.hidden, SIZE.expert_intermediate)
        yield from swiglu_shapes(f"{mlp}.shared_experts", SIZE.hidden, SIZE.expert_intermediate)


FAMILIES = (
    Family("v1", "DeepseekForCausalLM", "DeepseekAttention", {"model_type": "deepseek"}),
    Family("v2-mla", "DeepseekV2ForCausalLM", "DeepseekV2MLAAttention", {}),
    Family("v2-without-mla", "DeepseekV2ForCausalLM", "DeepseekV2Attention", {}),
    Family("v3-mla", "DeepseekV3ForCausalLM", "DeepseekV2MLAAttention", _V3),
    Family("v3-without-mla", "DeepseekV3ForCausalLM", "DeepseekV2Attention", _V3),
)

IMAGE_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Around(Family):
    """A vision-language model around one of the family."""

    def config(self) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": "kimi_vl",
            "text_config": {**Family.config(self), "architectures": None},
            "vision_config": {
                "model_type": "moonvit",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "patch_size": 14,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
                "merge_kernel_size": [2, 2],
            },
            "media_placeholder_token_id": IMAGE_TOKEN,
        }


AROUND = Around("kimi-vl", "KimiVLForConditionalGeneration", "DeepseekV2MLAAttention", {})


def write_config(folder: Path, family: Family) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(family.config(), indent=1))
    return folder


def random_tensors(family: Family, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors: norms and the bias of the router are random too, so that a swap would show."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in family.shapes():
        tensors[name] = random_weight(name, shape, generator)
        if len(shape) == 1:
            tensors[name] += torch.empty(shape).normal_(0.0, 0.1, generator=generator)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder
