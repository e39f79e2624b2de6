"""vLLM's distributed environment of one process, and its registry without the subprocesses that inspect a model."""

import os
from collections.abc import Iterator

import pytest
import torch

from afd_runtime import link


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process for the folder under `--dist loadgroup`: importing vLLM takes longer than all of its tests."""
    for item in items:
        if item.path.parent.name == "proof":
            item.add_marker(pytest.mark.xdist_group("proof"))


@pytest.fixture(scope="package", autouse=True)
def vllm_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank on gloo, met over a file, that listens on the loopback only. Leaves the process as it was."""
    environment = dict(os.environ)
    # Other tests read vLLM's log through pytest, and expect its loggers as they are before it configures them.
    os.environ |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CONFIGURE_LOGGING": "0"}
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import deepseek_v2 as upstream
    from vllm.model_executor.models import kimi_vl
    from vllm.model_executor.models.registry import ModelRegistry

    from tests.proof.families import AROUND, FAMILIES

    registered = dict(ModelRegistry.models)
    for family in FAMILIES:
        ModelRegistry.register_model(family.architecture, getattr(upstream, family.architecture))
    ModelRegistry.register_model(AROUND.architecture, kimi_vl.KimiVLForConditionalGeneration)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # vLLM's bf16 attention kernel uses AMX where the CPU has it, once a process has asked Linux for it.
    torch.cpu._init_amx()
    meeting = tmp_path_factory.mktemp("distributed") / "meeting"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_current", None)
        patch.setattr(link, "_prepared", None)
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.cleanup_dist_env_and_memory()
    torch.set_num_threads(threads)
    ModelRegistry.models.clear()
    ModelRegistry.models.update(registered)
    os.environ.clear()
    os.environ.update(environment)
