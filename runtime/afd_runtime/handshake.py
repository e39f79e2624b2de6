"""What both roles must agree on before the first hop. Facts travel as JSON; nothing is pickled."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

from afd_runtime.config import AFDConfig, Role
from afd_runtime.errors import HandshakeError

Facts = dict[str, Any]
"""Field to a JSON value, in the order of the report."""

FORMAT = 1
NOT_THE_MODEL = {"architectures", "_name_or_path", "name_or_path", "transformers_version"}
"""Keys of a Hugging Face configuration that may differ between two copies of one model."""


def facts_of(vllm_config: Any, config: AFDConfig, wrapper: type, layers: tuple[int, ...]) -> Facts:
    """This role's facts; `wrapper` is the emitted model class, `layers` the numbers of its split layers."""
    import vllm

    model = vllm_config.model_config
    return {
        "handshake format": FORMAT,
        "vllm version": vllm.__version__,
        "model config": model_hash(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "hidden size": model.get_hidden_size(),
        "split layers": list(layers),
        "wrapper source": _sha256(Path(inspect.getfile(wrapper))),
        "connector": config.connector,
        "attention ranks": config.num_attention_ranks,
        "ffn ranks": config.num_ffn_ranks,
        "gate on attention": config.compute_gate_on_attention,
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "sequence parallel": bool(getattr(vllm_config.parallel_config, "use_sequence_parallel_moe", False)),
    }


def model_hash(hf_config: dict[str, Any]) -> str:
    """Of the model's configuration without names, paths and the tool that wrote it."""
    return hashlib.sha256(json.dumps(_kept(hf_config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def _kept(config: Any) -> Any:
    """Configurations within it included: a model of several parts has one of each."""
    if not isinstance(config, dict):
        return config
    return {key: _kept(value) for key, value in config.items() if key not in NOT_THE_MODEL}


def check_facts(mine: Facts, theirs: Facts, role: Role) -> None:
    """Raise `HandshakeError` naming each field that differs; the text is the same on both sides."""
    attention, ffn = (mine, theirs) if role == "attention" else (theirs, mine)
    fields = dict.fromkeys((*attention, *ffn))
    differing = [
        f"  {field}: attention has {attention.get(field, 'nothing')}, ffn has {ffn.get(field, 'nothing')}"
        for field in fields
        if field not in attention or field not in ffn or attention[field] != ffn[field]
    ]
    if differing:
        raise HandshakeError("\n".join(("the attention and the ffn role do not fit together:", *differing)))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
