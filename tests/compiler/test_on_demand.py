from collections.abc import Callable
from pathlib import Path

import pytest

from afd_compiler import on_demand
from afd_compiler.source import SourceTree
from afd_runtime.manifest import read_manifest

from .conftest import TINY, TINY_FILE


@pytest.fixture
def installed(tiny_tree: Callable[..., SourceTree], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*edits: tuple[str, str]) -> None:
        monkeypatch.setattr(on_demand, "installed_source", lambda: tiny_tree(*edits))
        monkeypatch.setattr(on_demand, "known_specs", lambda: ("tiny",))
        monkeypatch.setattr(on_demand, "load_spec", lambda name: TINY)

    return install


def test_it_returns_the_folder_of_the_wrapper(installed: Callable[..., None], tmp_path: Path) -> None:
    installed()
    folder = on_demand.compile_installed("TinyForCausalLM", "cpu", tmp_path / "cache")
    manifest = read_manifest(folder / "tiny.json")
    assert ([*manifest.sources], manifest.verdict) == ([TINY_FILE], "proved")
    assert manifest.architectures["TinyForCausalLM"].ffn == "FFNTinyForCausalLM"
    assert (folder / "tiny.py").is_file()


def test_a_refusal_is_an_error_with_the_reason(installed: Callable[..., None], tmp_path: Path) -> None:
    call = "            hidden_states = self.ffn(hidden_states)\n"
    installed((call, f"            for _ in (1,):\n    {call}"))
    with pytest.raises(on_demand.OnDemandError) as error:
        on_demand.compile_installed("TinyForCausalLM", "cpu", tmp_path / "cache")
    assert str(error.value).startswith(f"TinyForCausalLM cannot be split:\n{TINY_FILE}:72: forward: FFN work")
    assert not (tmp_path / "cache").exists()


def test_an_architecture_without_a_spec(installed: Callable[..., None], tmp_path: Path) -> None:
    installed()
    with pytest.raises(on_demand.OnDemandError) as error:
        on_demand.compile_installed("OtherForCausalLM", "cpu", tmp_path)
    assert str(error.value) == "no model spec names OtherForCausalLM\n  do: add it to a spec in model_specs/"
