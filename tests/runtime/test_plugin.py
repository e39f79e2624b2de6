"""The entry point, on a platform class of our own and once on the real one. Imports vLLM."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from afd_runtime import hook, plugin


class Platform:
    """As vLLM's platforms: the hook is a classmethod, and subclasses call their parent's."""

    calls: list[tuple[type, object]]

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Native."""
        cls.calls.append((cls, vllm_config))


@pytest.fixture
def platform() -> type[Platform]:
    return type("Fresh", (Platform,), {"calls": []})


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []
    monkeypatch.setattr(hook, "apply_afd", seen.append)
    return seen


@pytest.mark.parametrize("additional", [{}, {"other": 1}, None, "opaque"])
def test_without_afd_the_platform_alone_is_called(
    platform: type[Platform], applied: list[object], additional: object
) -> None:
    plugin._wrap(platform)
    config = SimpleNamespace(additional_config=additional)
    platform.check_and_update_config(config)
    assert platform.calls == [(platform, config)]
    assert applied == []


def test_with_afd_the_platform_goes_first_and_wrapping_twice_is_wrapping_once(
    platform: type[Platform], applied: list[object]
) -> None:
    plugin._wrap(platform)
    wrapped = platform.check_and_update_config
    plugin._wrap(platform)
    assert platform.check_and_update_config == wrapped
    config = SimpleNamespace(additional_config={"afd": {}})
    platform.check_and_update_config(config)
    assert platform.calls == [(platform, config)]
    assert applied == [config]


def test_only_the_class_of_the_platform_is_touched(platform: type[Platform]) -> None:
    native = vars(Platform)["check_and_update_config"]
    plugin._wrap(platform)
    assert vars(Platform)["check_and_update_config"] is native
    assert set(vars(platform)) - {"calls", "__module__", "__doc__"} == {"check_and_update_config"}
    assert platform.check_and_update_config.__doc__ == "Native."


def test_a_child_process_knows_the_aliases_that_its_parent_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setenv("AFD_ALIASES", '{"AFDFFNTiny": "tiny:FFNTiny"}')
    plugin.register()
    plugin.register()
    registered = ModelRegistry.models["AFDFFNTiny"]
    assert (registered.module_name, registered.class_name) == ("tiny", "FFNTiny")


def test_without_afd_no_alias_is_registered_and_nothing_of_the_runtime_is_loaded() -> None:
    program = (
        "import sys, time\n"
        "import vllm.platforms, vllm.model_executor.models.registry as registry\n"
        "native = set(registry.ModelRegistry.models)\n"
        "from afd_runtime import plugin\n"
        "vllm.platforms.current_platform\n"
        "start = time.perf_counter()\n"
        "plugin.register()\n"
        "assert time.perf_counter() - start < 0.1\n"
        "assert set(registry.ModelRegistry.models) == native\n"
        "loaded = sorted(name for name in sys.modules if name.startswith('afd_'))\n"
        "assert loaded == ['afd_runtime', 'afd_runtime.plugin'], loaded\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "AFD_ALIASES"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
