"""Names of emitted things, each spelled once."""

import re

ROLES = ("attention", "ffn")
UPSTREAM = "upstream"
BUILD_PART = "build_part"
ABSENT_EXPERTS = "AbsentExperts"
ABSENT_ATTENTION = "AbsentAttention"


def remote_class(child: str) -> str:
    """Stand-in of an FFN submodule on attention: `mlp` -> `RemoteMlp`."""
    return "Remote" + "".join(part.capitalize() for part in child.split("_"))


def role_class(role: str, upstream: str) -> str:
    """What is a role's own: its subclass of an upstream class, or the base of those."""
    return {"attention": "Attention", "ffn": "FFN"}[role] + upstream


def module_alias(module: str) -> str:
    """What an emitted module calls an upstream module beside the layer's own: its path below the model package."""
    return module.partition("models.")[2].rpartition("models.")[2].replace(".", "_")


def release_package(release: str) -> str:
    """Folder of one release in the emitted package: "0.32.0" -> "vllm_0_32_0"."""
    return "vllm_" + re.sub(r"\W", "_", release)
