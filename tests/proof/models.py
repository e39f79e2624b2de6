"""Builds native and split models in one process, and runs layers of theirs on a batch with real attention metadata."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from afd_runtime import link
from tests.proof.families import SIZE, Family, write_config

Role = Literal["attention", "ffn"]
ROLES: tuple[Role, ...] = ("attention", "ffn")
TOKENS = 128
"""The largest batch, and the longest sequence."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model, and the configuration that holds its layers by name."""

    config: VllmConfig
    model: Any

    def layer(self, index: int) -> Any:
        return getattr(self.model, "language_model", self.model).model.layers[index]


def build(family: Family, folder: Path, dtype: torch.dtype, role: Role | None = None) -> Built:
    """As vLLM's model loader does, up to the weights; without a role the model is upstream's own."""
    afd = {"role": role, "connector": "GlooAFDConnector", "host": "127.0.0.1", "port": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MLA_DISABLE", "0" if family.mla else "1")
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=str(dtype).removeprefix("torch."),
            enforce_eager=True,
            max_model_len=TOKENS,
            max_num_batched_tokens=TOKENS,
            max_num_seqs=4,
            kv_cache_memory_bytes=2**26,
            # The AMX backend takes bf16 only, and is chosen where the CPU has AMX.
            attention_backend="CPU_MLA" if family.mla else None,
            # The CPU's own rotary kernel is wrong for DeepSeek's 3-D queries, on both sides alike.
            compilation_config={"custom_ops": ["-rotary_embedding"]},
            additional_config={} if role is None else {"afd": afd},
        ).create_engine_config()
        with set_default_torch_dtype(dtype):
            return Built(config, initialize_model(config))


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter, those of norms around 1, with values that keep activations in fp16's range."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        values = torch.empty(parameter.shape, dtype=torch.float32).normal_(centre, scale, generator=generator)
        parameter.data.copy_(values)


def copy_parameters(source: nn.Module, targets: list[nn.Module]) -> None:
    """By name; the targets together must have all names."""
    values = dict(source.named_parameters())
    names = [name for target in targets for name, _ in target.named_parameters()]
    assert sorted(names) == sorted(values)
    for target in targets:
        for name, parameter in target.named_parameters():
            parameter.data.copy_(values[name])


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests as (tokens already in the cache, new tokens); those with one new token come first."""

    requests: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.requests)

    def positions(self) -> Tensor:
        return torch.cat([torch.arange(old, old + new) for old, new in self.requests])


BATCHES = {
    "1 token, a decode": Batch(((5, 1),)),
    "64 tokens, a prefill": Batch(((0, 64),)),
    "37 tokens, a decode and a prefill": Batch(((9, 1), (0, 36))),
}


def attention_modules(config: VllmConfig) -> dict[str, Any]:
    layers = config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if hasattr(layer, "get_attn_backend")}


def fill_caches(config: VllmConfig, seed: int = 1) -> None:
    """Give each attention layer a cache of the blocks that `forward_context` uses, with the same random content."""
    generator = torch.Generator().manual_seed(seed)
    for layer in attention_modules(config).values():
        spec = layer.get_kv_cache_spec(config)
        blocks = 1 + 4 * (TOKENS // spec.block_size)
        shape: tuple[int, ...] = (blocks, spec.block_size, spec.head_size)
        if not layer.get_attn_backend().is_mla():
            shape = (blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        layer.kv_cache = torch.empty(shape).normal_(0.0, 1.0, generator=generator).to(spec.dtype)


@contextmanager
def forward_context(config: VllmConfig, batch: Batch) -> Iterator[None]:
    """With the metadata that the attention backend's own builder makes of the batch; nothing for a model without."""
    metadata: dict[str, Any] = {}
    slots: dict[str, Tensor] = {}
    for name, layer in attention_modules(config).items():
        spec = layer.get_kv_cache_spec(config)
        common = _common_metadata(batch, spec.block_size)
        with set_current_vllm_config(config):
            builder = layer.get_attn_backend().get_builder_cls()(spec, [name], config, torch.device("cpu"))
            metadata[name] = builder.build(0, common)
        slots[name] = common.slot_mapping
    with set_forward_context(metadata or None, config, num_tokens=batch.tokens, slot_mapping=slots):
        yield


def _common_metadata(batch: Batch, block_size: int) -> CommonAttentionMetadata:
    """Each request has its own row of blocks; block 0 is left free, as vLLM leaves it."""
    per_request = TOKENS // block_size
    table = 1 + torch.arange(len(batch.requests) * per_request, dtype=torch.int32).view(-1, per_request)
    slots = [
        table[row, position // block_size].item() * block_size + position % block_size
        for row, (old, new) in enumerate(batch.requests)
        for position in range(old, old + new)
    ]
    starts = torch.tensor([0, *(new for _, new in batch.requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([old + new for old, new in batch.requests], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(batch.requests),
        num_actual_tokens=batch.tokens,
        max_query_len=max(new for _, new in batch.requests),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        positions=batch.positions(),
    )


class InProcess:
    """The link of an attention role whose FFN role is a model in the same process."""

    def __init__(self, ffn: Built) -> None:
        self._ffn = ffn
        self._sent: dict[int, tuple[Tensor | None, ...]] = {}
        self.hops: list[tuple[str, int, bool]] = []

    def send(self, x: Tensor, extras: link.Extras, layer: int, opens_step: bool) -> None:
        self._sent[layer] = tuple(value if value is None else value.clone() for value in (x, *extras))
        self.hops.append(("send", layer, opens_step))

    def recv(self, out: Tensor, layer: int) -> None:
        with set_forward_context(None, self._ffn.config, num_tokens=out.shape[0]):
            out.copy_(self._ffn.layer(layer)(*self._sent.pop(layer)))
        self.hops.append(("recv", layer, False))


@dataclass(frozen=True, slots=True)
class Models:
    native: Built
    attention: Built
    ffn: Built


def build_all(family: Family, folder: Path, dtype: torch.dtype) -> Models:
    """Native, and both roles with its weights, which kernels have not packed yet."""
    write_config(folder, family)
    models = Models(*(build(family, folder, dtype, role) for role in (None, *ROLES)))
    randomise(models.native.model)
    copy_parameters(models.native.model, [models.attention.model, models.ffn.model])
    return models


def finish(models: Models) -> None:
    """What vLLM's model loader does once weights are there: kernels pack them."""
    for built in (models.native, models.attention, models.ffn):
        with set_current_vllm_config(built.config):
            process_weights_after_loading(built.model, built.config.model_config, torch.device("cpu"))


def exchange_in_process(models: Models) -> InProcess:
    """From now on the FFN model answers what the attention model sends."""
    exchange = InProcess(models.ffn)
    link.install(exchange)
    return exchange


def random_hidden(tokens: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(tokens, SIZE.hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
