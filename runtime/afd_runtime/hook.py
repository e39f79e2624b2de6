"""The one hook into vLLM: what a role changes in a VllmConfig, after the platform has had its say."""

from typing import Any

from afd_runtime.config import AFDConfig, parse_config, refuse_unsupported_vllm
from afd_runtime.errors import AFDConfigError, WrapperError
from afd_runtime.split import build_whole, is_part
from afd_runtime.workers import FFN_WORKER, platform_worker
from afd_runtime.wrappers import native_of, role_alias

REFUSE_V1 = "afd_runtime.refuse:RefuseRequests"
REFUSE_V2 = "afd_runtime.refuse_v2:RefuseRequests"


def apply_afd(vllm_config: Any) -> None:
    """Turn a VllmConfig into that of its role. Doing so again changes nothing: vLLM copies and re-validates it."""
    if vllm_config.model_config is None:
        return
    config = parse_config(vllm_config.additional_config["afd"])
    refuse_unsupported_vllm(vllm_config)
    device_type = vllm_config.device_config.device_type
    if config.connector == "GlooAFDConnector" and device_type != "cpu":
        raise AFDConfigError(f"afd.connector: GlooAFDConnector serves the CPU only, but the device is {device_type}")
    _use_wrapper(vllm_config, config)
    if config.role == "ffn":
        _become_ffn(vllm_config)


def _use_wrapper(vllm_config: Any, config: AFDConfig) -> None:
    """Swap the name that vLLM's model loader resolves.

    Only that one: `ModelConfig.architectures` and `.architecture` are read for the model's traits (kind of runner, MLA,
    config overrides by name), which are the native model's, and would need the registry to inspect the alias.
    """
    hf_config = vllm_config.model_config.hf_config
    if not hf_config.architectures:
        raise AFDConfigError("afd: the model's config.json names no architecture; add its `architectures`")
    native = native_of(hf_config.architectures[0])
    try:
        hf_config.architectures = [role_alias(config.role, native)]
    except WrapperError as error:
        if not is_part():
            raise
        build_whole(str(error))


def _become_ffn(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    expected = platform_worker(vllm_config.device_config.device_type)
    if parallel.worker_cls not in (expected, FFN_WORKER):
        raise AFDConfigError(
            f"afd: the ffn role brings its own worker, "
            f"but worker_cls is {parallel.worker_cls!r}; start without --worker-cls"
        )
    parallel.worker_cls = FFN_WORKER
    _without_prefix_cache(vllm_config.cache_config)
    if (multimodal := getattr(vllm_config.model_config, "multimodal_config", None)) is not None:
        # Images and the like are Attention's: no tower is built, and none is run when memory is measured.
        multimodal.language_model_only = True
    _refuse_requests(vllm_config)


def _without_prefix_cache(cache_config: Any) -> None:
    """A model without attention has no KV cache group, and the prefix cache asserts that there is one."""
    cache_config.enable_prefix_caching = False
    # vLLM derived these from a prefix cache before, for a model with recurrent layers, and refuses them without one.
    if getattr(cache_config, "mamba_block_size", None) is not None:
        cache_config.mamba_block_size = None
        cache_config.mamba_cache_mode = "none"


def _refuse_requests(vllm_config: Any) -> None:
    model_config = vllm_config.model_config
    others = [name for name in model_config.logits_processors or () if name not in (REFUSE_V1, REFUSE_V2)]
    model_config.logits_processors = [*others, REFUSE_V1]
    # Read after the line above: in some releases a logits processor is what makes vLLM choose the v1 runner.
    if getattr(vllm_config, "use_v2_model_runner", False):
        model_config.logits_processors = [*others, REFUSE_V2]
