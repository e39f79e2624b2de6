"""With the package installed and no `afd` settings, vLLM is as it was: same answers, and one hook that does nothing."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from demo.checkpoint import prompt_of
from demo.servers import ENVIRONMENT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("generate_plainly.py")
HOOK = "vllm.platforms.cpu.CpuPlatform.check_and_update_config"


def start(checkpoint: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(checkpoint), prompt_of(9)],
        env={**os.environ, **ENVIRONMENT, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=240)
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert process.returncode == 0, output
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def results(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """What `LLM` does with our plugin, and with all plugins off; side by side, to use both cores."""
    processes = {"plugin": start(checkpoint), "bare": start(checkpoint, VLLM_PLUGINS="")}
    try:
        return {name: result_of(process) for name, process in processes.items()}
    finally:
        for process in processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_answers_are_identical(results: dict[str, dict[str, Any]]) -> None:
    for key in ("tokens", "logprobs", "worker", "architectures"):
        assert results["plugin"][key] == results["bare"][key]
    assert results["plugin"]["architectures"] == ["DeepseekV2ForCausalLM"]


def test_only_the_config_hook_is_replaced(results: dict[str, dict[str, Any]]) -> None:
    assert results["bare"]["replaced"] == {"front": [], "worker": []}
    assert results["plugin"]["replaced"] == {"front": [HOOK], "worker": [HOOK]}


def test_nothing_but_the_plugin_is_loaded(results: dict[str, dict[str, Any]]) -> None:
    plugin = ["afd_runtime", "afd_runtime.plugin"]
    assert results["bare"]["loaded"] == {"front": [], "worker": []}
    assert results["plugin"]["loaded"] == {"front": plugin, "worker": plugin}
