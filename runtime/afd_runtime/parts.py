"""A model of the registry within another: which architecture gives the role's part of it."""

from typing import Any

from afd_runtime.errors import WrapperError
from afd_runtime.split import build_whole
from afd_runtime.wrappers import native_of, role_alias


def part_architectures(vllm_config: Any, hf_config: Any, architectures: list[str] | None) -> list[str] | None:
    """The alias of what vLLM would build; unchanged where that has no wrapper, a vision tower say."""
    named = architectures
    if named is None:
        inner = vllm_config if hf_config is None else vllm_config.with_hf_config(hf_config)
        named = inner.model_config.hf_config.architectures
    try:
        return [role_alias(vllm_config.additional_config["afd"]["role"], native_of(named[0]))]
    except WrapperError as error:
        build_whole(str(error))
        return architectures
