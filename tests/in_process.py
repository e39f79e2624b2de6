"""vLLM in the process of the tests: a world of one rank, and models built in it as vLLM's loader does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from afd_runtime import link


@contextmanager
def world_of_one(folder: Path) -> Iterator[None]:
    """One rank on gloo, met over a file, that listens on the loopback only. Leaves the process as it was."""
    environment = dict(os.environ)
    # Other tests read vLLM's log through pytest, and expect its loggers as they are before it configures them.
    os.environ |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CONFIGURE_LOGGING": "0"}
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models.registry import ModelRegistry

    registered = dict(ModelRegistry.models)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # vLLM's bf16 attention kernel uses AMX where the CPU has it, once a process has asked Linux for it.
    torch.cpu._init_amx()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_current", None)
        patch.setattr(link, "_prepared", None)
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'meeting'}", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.cleanup_dist_env_and_memory()
    torch.set_num_threads(threads)
    ModelRegistry.models.clear()
    ModelRegistry.models.update(registered)
    os.environ.clear()
    os.environ.update(environment)


def without_inspection(architecture: str) -> None:
    """Register a model's class itself: vLLM then starts no process to inspect it."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
