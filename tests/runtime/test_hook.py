"""What a role changes in a VllmConfig, on a stand-in that has the fields the hook reads."""

from types import SimpleNamespace
from typing import Any

import pytest

from afd_runtime import hook, wrappers
from afd_runtime.errors import AFDConfigError
from afd_runtime.manifest import Roles
from afd_runtime.workers import FFN_WORKER, platform_worker
from afd_runtime.wrappers import Wrapper, native_of

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


class FakeVllmConfig(SimpleNamespace):
    """As vLLM 0.26: a logits processor turns the v2 runner off unless `v2_always`."""

    v2_always = False

    @property
    def use_v2_model_runner(self) -> bool:
        return self.v2_always or not self.model_config.logits_processors


def vllm_config(role: str, worker_cls: str = CPU_WORKER, architectures: list[str] | None = None) -> Any:
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["TinyForCausalLM"] if architectures is None else architectures),
        model_arch_config=SimpleNamespace(architectures=["TinyForCausalLM"]),
        logits_processors=None,
    )
    return FakeVllmConfig(
        additional_config={"afd": {"role": role}},
        model_config=model,
        parallel_config=SimpleNamespace(worker_cls=worker_cls),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.fixture(autouse=True)
def aliases(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    registered: dict[str, str] = {}
    found = Wrapper("tiny", Roles(attention="AttentionTiny", ffn="FFNTiny"))
    monkeypatch.setattr(wrappers, "find_wrapper", lambda architecture, platform: found)
    monkeypatch.setattr(wrappers, "register_aliases", registered.update)
    monkeypatch.setattr(wrappers, "_platform_name", lambda: "cpu")
    return registered


def test_attention_changes_the_loaded_class_and_nothing_else(aliases: dict[str, str]) -> None:
    config = vllm_config("attention")
    expected = vllm_config("attention")
    expected.model_config.hf_config.architectures = ["AFDAttentionTinyForCausalLM"]
    hook.apply_afd(config)
    assert config == expected
    assert aliases == {
        "AFDAttentionTinyForCausalLM": "tiny:AttentionTiny",
        "AFDFFNTinyForCausalLM": "tiny:FFNTiny",
    }


def test_ffn_brings_its_worker_and_refuses_requests() -> None:
    config = vllm_config("ffn")
    hook.apply_afd(config)
    assert config.model_config.hf_config.architectures == ["AFDFFNTinyForCausalLM"]
    assert config.model_config.model_arch_config.architectures == ["TinyForCausalLM"]
    assert config.parallel_config.worker_cls == FFN_WORKER
    assert config.cache_config.enable_prefix_caching is False
    assert config.model_config.logits_processors == [hook.REFUSE_V1]


def test_ffn_of_a_model_with_recurrent_layers_keeps_nothing_of_the_prefix_cache() -> None:
    config = vllm_config("ffn")
    config.cache_config = SimpleNamespace(enable_prefix_caching=True, mamba_block_size=128, mamba_cache_mode="align")
    hook.apply_afd(config)
    assert vars(config.cache_config) == {
        "enable_prefix_caching": False,
        "mamba_block_size": None,
        "mamba_cache_mode": "none",
    }


def test_ffn_on_the_v2_runner_refuses_with_its_kind_of_processor() -> None:
    config = vllm_config("ffn")
    config.v2_always = True
    config.model_config.logits_processors = ["mine:Processor"]
    for _ in range(2):
        hook.apply_afd(config)
        assert config.model_config.logits_processors == ["mine:Processor", hook.REFUSE_V2]


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_a_config_that_is_validated_again_stays_as_it_is(role: str) -> None:
    once, twice = vllm_config(role), vllm_config(role)
    hook.apply_afd(once)
    hook.apply_afd(twice)
    hook.apply_afd(twice)
    assert twice == once


def test_a_config_without_a_model_is_left_alone() -> None:
    config = SimpleNamespace(model_config=None, additional_config={"afd": {"role": "ffn"}})
    hook.apply_afd(config)
    assert config == SimpleNamespace(model_config=None, additional_config={"afd": {"role": "ffn"}})


def test_a_worker_of_the_users_own() -> None:
    with pytest.raises(AFDConfigError) as error:
        hook.apply_afd(vllm_config("ffn", worker_cls="mine.Worker"))
    assert str(error.value) == (
        "afd: the ffn role brings its own worker, but worker_cls is 'mine.Worker'; start without --worker-cls"
    )


def test_gloo_on_a_gpu() -> None:
    config = vllm_config("ffn")
    config.device_config.device_type = "cuda"
    with pytest.raises(AFDConfigError) as error:
        hook.apply_afd(config)
    assert str(error.value) == "afd.connector: GlooAFDConnector serves the CPU only, but the device is cuda"


def test_a_model_without_architectures() -> None:
    with pytest.raises(AFDConfigError) as error:
        hook.apply_afd(vllm_config("ffn", architectures=[]))
    assert str(error.value) == "afd: the model's config.json names no architecture; add its `architectures`"


def test_a_device_without_an_ffn_worker() -> None:
    with pytest.raises(AFDConfigError) as error:
        platform_worker("tpu")
    assert str(error.value) == "afd: no FFN worker for device type 'tpu'; known are cpu, cuda, npu"


@pytest.mark.parametrize("name", ["TinyForCausalLM", "AFDAttentionTinyForCausalLM", "AFDFFNTinyForCausalLM"])
def test_the_native_name_behind_an_alias(name: str) -> None:
    assert native_of(name) == "TinyForCausalLM"


@pytest.mark.parametrize(("role", "text_only"), [("attention", False), ("ffn", True)])
def test_towers_are_attentions(role: str, text_only: bool) -> None:
    config = vllm_config(role)
    config.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    hook.apply_afd(config)
    assert config.model_config.multimodal_config.language_model_only is text_only
