"""A small DeepSeek-V2 checkpoint with seeded random weights, in the form vLLM and Hugging Face load.

MLA keeps the head sizes of the published models, because vLLM's CPU kernels are written for those.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

Shape = tuple[int, ...]
LOGIT_SCALE = 4.0
"""Standard deviation of the logits: at 4, greedy choices between tokens are rarely close."""
KV_RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
SPECIAL = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions of the model. The first layer is dense, all others route each token to 2 experts."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    dense_intermediate: int = 256
    experts: int = 8
    expert_intermediate: int = 64
    vocabulary: int = 512
    context: int = 512


def config_of(size: Size) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "torch_dtype": "bfloat16",
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "q_lora_rank": None,
        "kv_lora_rank": KV_RANK,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        "attention_bias": False,
        "intermediate_size": size.dense_intermediate,
        "moe_intermediate_size": size.expert_intermediate,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": size.context,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
    }


def swiglu_shapes(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def layer_shapes(size: Size, index: int) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of one decoder layer's tensors."""
    layer, hidden = f"model.layers.{index}", size.hidden
    yield f"{layer}.input_layernorm.weight", (hidden,)
    yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield f"{layer}.self_attn.q_proj.weight", (size.heads * (NOPE + ROPE), hidden)
    yield f"{layer}.self_attn.kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, hidden)
    yield f"{layer}.self_attn.kv_a_layernorm.weight", (KV_RANK,)
    yield f"{layer}.self_attn.kv_b_proj.weight", (size.heads * (NOPE + VALUE), KV_RANK)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, size.heads * VALUE)
    if index == 0:
        yield from swiglu_shapes(f"{layer}.mlp", hidden, size.dense_intermediate)
        return
    yield f"{layer}.mlp.gate.weight", (size.experts, hidden)
    for expert in range(size.experts):
        yield from swiglu_shapes(f"{layer}.mlp.experts.{expert}", hidden, size.expert_intermediate)
    yield from swiglu_shapes(f"{layer}.mlp.shared_experts", hidden, size.expert_intermediate)


def random_weight(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    """bf16: ones for norms, else normal and scaled so that a product is about as large as its input."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = {"model.embed_tokens.weight": 1.0, "lm_head.weight": LOGIT_SCALE * shape[1] ** -0.5}
    weight = torch.empty(shape).normal_(0.0, scale.get(name, shape[1] ** -0.5), generator=generator)
    return weight.to(torch.bfloat16)


def write_shards(folder: Path, shards: list[list[tuple[str, Shape]]], seed: int) -> None:
    """Write each list of tensors as one safetensors file, and the index that vLLM finds them by."""
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: random_weight(name, shape, generator) for name, shape in shapes}, folder / file)
        weight_map |= dict.fromkeys((name for name, _ in shapes), file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def words(count: int) -> list[str]:
    """`count` different words of two syllables (up to 4225), in a fixed order."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou"]
    every = len(syllables)
    return [syllables[i * 17 % every] + syllables[(i * 29 + i // every) % every] for i in range(count)]


def write_tokenizer(folder: Path, size: Size) -> None:
    """A tokenizer with one token per word, so that any generated token decodes to readable text."""
    entries = [*SPECIAL, *words(size.vocabulary - len(SPECIAL))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": size.context,
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_checkpoint(folder: Path, size: Size | None = None, seed: int = 0) -> Path:
    """Write config, tokenizer and one safetensors shard per layer plus one for the rest; return the folder."""
    size = size or Size()
    folder.mkdir(parents=True, exist_ok=True)
    outside: list[tuple[str, Shape]] = [
        ("model.embed_tokens.weight", (size.vocabulary, size.hidden)),
        ("model.norm.weight", (size.hidden,)),
        ("lm_head.weight", (size.vocabulary, size.hidden)),
    ]
    layers = [list(layer_shapes(size, index)) for index in range(size.layers)]
    write_shards(folder, [outside, *layers], seed)
    write_tokenizer(folder, size)
    (folder / "config.json").write_text(json.dumps(config_of(size), indent=1))
    return folder


def count_parameters(folder: Path) -> int:
    """Elements of all tensors in the checkpoint, read from the files' headers."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            total += sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
    return total


def prompt_of(count: int, start: int = 0, size: Size | None = None) -> str:
    """A prompt of `count` tokens; different `start` values give different prompts."""
    vocabulary = words((size or Size()).vocabulary - len(SPECIAL))
    return " ".join(vocabulary[(start * 53 + i * 17) % len(vocabulary)] for i in range(count))
