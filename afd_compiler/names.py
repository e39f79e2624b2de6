"""Names of emitted things, each spelled once."""

import re

ATTENTION_LAYER = "AttentionDecoderLayer"
FFN_LAYER = "FFNDecoderLayer"
ATTENTION_ROLE = "AttentionRole"
FFN_ROLE = "FFNRole"


def remote_class(child: str) -> str:
    """Stand-in of an FFN submodule on attention: `mlp` -> `RemoteMlp`."""
    return "Remote" + "".join(part.capitalize() for part in child.split("_"))


def causal_lm_class(role: str, upstream: str) -> str:
    """A role's subclass of an upstream causal LM class."""
    return {"attention": "Attention", "ffn": "FFN"}[role] + upstream


def release_package(release: str) -> str:
    """Folder of one release in the emitted package: "0.32.0" -> "vllm_0_32_0"."""
    return "vllm_" + re.sub(r"\W", "_", release)
