"""Entry point of `vllm.general_plugins`: runs in every vLLM process, more than once, with AFD or without."""

import functools
import os
from typing import Any


def register() -> None:
    """Wrap the platform's config hook, and make the aliases known that a parent process has found."""
    from vllm.platforms import current_platform

    _wrap(type(current_platform))
    if "AFD_ALIASES" in os.environ:
        from afd_runtime.wrappers import inherited_aliases, register_aliases

        register_aliases(inherited_aliases())


def _wrap(platform: Any) -> None:
    """Replace a classmethod by one that calls it and then applies AFD, if `additional_config` asks for it."""
    native = platform.check_and_update_config
    if hasattr(native, "afd"):
        return

    @functools.wraps(native.__func__)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        native.__func__(cls, vllm_config)
        additional = vllm_config.additional_config
        if isinstance(additional, dict) and "afd" in additional:
            from afd_runtime.hook import apply_afd

            apply_afd(vllm_config)

    check_and_update_config.afd = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)
