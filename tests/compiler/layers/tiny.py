"""The smallest model with everything a split has to respect: dense and MoE layers, a residual, a rescale, a flag."""

import torch
from torch import nn

from vllm.distributed import all_reduce, world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.embedding import Embedding
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.utils import PPMissingLayer, make_layers
from vllm.platforms import current_platform


class TinyMLP(nn.Module):
    def __init__(self, size, prefix):
        super().__init__()

    def forward(self, x, scaled=False):
        return x


class TinyMoE(nn.Module):
    def __init__(self, config, prefix):
        super().__init__()
        self.experts = FusedMoE(config.num_experts)

    def forward(self, x, scaled=False):
        return self.experts(x)


class TinyAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config.heads)

    def forward(self, positions, x):
        return self.attn(x)


class TinyDecoderLayer(nn.Module):
    def __init__(self, vllm_config, prefix, quant_config=None):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.flag = config.flag
        self.scale = config.scale
        self.self_attn = TinyAttention(config)
        if config.is_moe:
            self.ffn = TinyMoE(config, prefix=f"{prefix}.ffn")
        else:
            self.ffn = TinyMLP(config.size, prefix=f"{prefix}.ffn")
        self.norm1 = RMSNorm(config.size)
        self.norm2 = RMSNorm(config.size)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ):
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm1(hidden_states)
        else:
            hidden_states, residual = self.norm1(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.norm2(hidden_states, residual)
        if self.flag:
            hidden_states = self.ffn(hidden_states, scaled=True)
        else:
            hidden_states = self.ffn(hidden_states)
        if isinstance(self.ffn, TinyMLP) and hidden_states.dtype == torch.float16:
            # Rescale the dense output.
            hidden_states *= 1.0 / self.scale
        return hidden_states, residual


class TinyModel(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.embed_tokens = Embedding(vllm_config) if current_platform else PPMissingLayer()
        self.start, self.end, self.layers = make_layers(
            2, lambda prefix: TinyDecoderLayer(vllm_config, prefix=prefix), ""
        )
        self.norm = RMSNorm(vllm_config)


class TinyForCausalLM(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.model = TinyModel(vllm_config=vllm_config)


def unused():
    return all_reduce, world_size
