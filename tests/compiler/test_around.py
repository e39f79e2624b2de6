"""A model built around another registered one: compiled without layers of its own, split by that one's wrapper."""

from collections.abc import Callable

import pytest

from afd_compiler.discover import discover
from afd_compiler.outcome import Compiled, Outcome, Refusal
from afd_compiler.pipeline import compile_family
from afd_compiler.report import files_of, layer_entries
from afd_compiler.source import SourceTree
from afd_compiler.spec import Spec
from afd_compiler.symbols import Symbols
from afd_runtime.manifest import Manifest

MODULE = "vllm.model_executor.models.seeing"
FILE = "vllm/model_executor/models/seeing.py"
SEEING = Spec(family="seeing", module=MODULE, architectures=("SeeingTiny",))
SOURCE = """
from torch import nn

from vllm.model_executor.layers.embedding import Embedding
from vllm.model_executor.models.utils import PPMissingLayer, init_vllm_registered_model


class Tower(nn.Module):
    def __init__(self, config, prefix):
        super().__init__()


class SeeingTiny(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.tower = Tower(config, prefix=f"{prefix}.tower")
        self.projector = Embedding(config) if config.projects else PPMissingLayer()
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, hf_config=config.text_config, architectures=["TinyForCausalLM"]
        )
        self.empty = self.language_model.empty
"""
FILES = {
    "vllm/model_executor/models/registry.py": (
        'MODELS = {"TinyForCausalLM": ("tiny", "TinyForCausalLM"), "SeeingTiny": ("seeing", "SeeingTiny")}\n'
    ),
    "vllm/model_executor/models/utils.py": (
        "from torch import nn\nclass PPMissingLayer(nn.Identity): ...\ndef make_layers(*a): ...\n"
        "def init_vllm_registered_model(**k): ...\n"
    ),
}
Compile = Callable[..., Outcome]


@pytest.fixture
def compile_seeing(tiny_tree: Callable[..., SourceTree]) -> Compile:
    def run(*edits: tuple[str, str]) -> Outcome:
        text = SOURCE
        for old, new in edits:
            assert text.count(old) == 1
            text = text.replace(old, new)
        return compile_family(SEEING, tiny_tree(**FILES, **{FILE: text}), "cpu")

    return run


def test_both_roles_build_the_registered_model_and_attention_alone_the_rest(compile_seeing: Compile) -> None:
    compiled = compile_seeing()
    assert isinstance(compiled, Compiled), compiled.reason
    assert (
        compiled.text.partition("\n\n\n")[2]
        == """class AttentionRole(AttentionModel):
    def __init__(self, *, vllm_config, prefix=""):
        with bind(upstream, init_vllm_registered_model=build_part):
            super().__init__(vllm_config=vllm_config, prefix=prefix)


class FFNRole(FFNModel):
    def __init__(self, *, vllm_config, prefix=""):
        with bind(upstream, Embedding=Unowned, Tower=Unowned, init_vllm_registered_model=build_part):
            super().__init__(vllm_config=vllm_config, prefix=prefix)


class AttentionSeeingTiny(AttentionRole, upstream.SeeingTiny):
    pass


class FFNSeeingTiny(FFNRole, upstream.SeeingTiny):
    pass
"""
    )


def test_the_manifest_says_what_was_proved(compile_seeing: Compile) -> None:
    compiled = compile_seeing()
    assert isinstance(compiled, Compiled)
    manifest = Manifest.model_validate_json(files_of(compiled)[2].text)
    assert (manifest.layers, manifest.unproved()) == ((), ())
    assert [(check.name, check.variants) for check in manifest.checks] == [("construction", 2), ("registered-model", 2)]
    assert manifest.owners == {"projector": "attention", "tower": "attention"}
    stripped = manifest.model_copy(update={"checks": manifest.checks[:1]})
    assert stripped.unproved() == ("registered-model",)
    (entry,) = layer_entries(compiled)
    assert (entry["verdict"], entry["layer_class"], entry["at"]) == ("proved", None, f"{FILE}:13")


REFUSED = {
    "a tower whose parts are asked for": (
        ("        self.projector =", "        self.width = self.tower.width\n        self.projector ="),
        f"{FILE}:13: SeeingTiny.__init__: on the ffn role: AttributeError: 'Unowned' object has no attribute 'width' "
        f"({FILE}:18) [construction]\n"
        "  do: serve this family unsplit: its constructors need what the other role owns",
    ),
    "a constructor that never builds it": (
        ("        self.tower = Tower", '        raise ValueError("no")\n        self.tower = Tower'),
        f"{FILE}:13: SeeingTiny.__init__: upstream's own constructor cannot be followed: it raises ValueError: no "
        "[construction]\n  do: serve this family unsplit: its constructors need what the other role owns",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(compile_seeing: Compile, what: str) -> None:
    edit, text = REFUSED[what]
    outcome = compile_seeing(edit)
    assert isinstance(outcome, Refusal)
    assert str(outcome.reason) == text


def test_it_is_discovered_where_the_source_names_experts(tiny_tree: Callable[..., SourceTree]) -> None:
    def found(text: str, *names: str) -> list[str]:
        symbols = Symbols(tiny_tree(**FILES, **{FILE: text}), "cpu")
        return [item.spec.family for item in discover(symbols, [], *names)]

    unnamed = SOURCE.replace(', architectures=["TinyForCausalLM"]', "")
    assert found(SOURCE) == ["seeing", "tiny"]
    assert found(unnamed) == ["tiny"]
    assert found(unnamed, "SeeingTiny") == ["seeing"]


def test_an_architecture_that_builds_none_of_the_layers_is_refused(
    tiny_tree: Callable[..., SourceTree],
) -> None:
    """It reaches them, in code that its constructor does not run."""
    other = (
        "\n\nclass Other(nn.Module):\n    def __init__(self, *, vllm_config, prefix):\n        super().__init__()\n\n"
        "    def never(self, vllm_config):\n        return TinyModel(vllm_config=vllm_config)\n"
    )
    registry = {
        "vllm/model_executor/models/registry.py": 'M = {"A": ("tiny", "TinyForCausalLM"), "B": ("tiny", "Other")}\n'
    }
    spec = Spec(family="tiny", module="vllm.model_executor.models.tiny", architectures=("A", "B"))
    end = "def unused():\n"
    outcome = compile_family(spec, tiny_tree((end, f"{other.strip()}\n\n\n{end}"), **registry), "cpu")
    assert isinstance(outcome, Refusal)
    assert str(outcome.reason) == (
        "vllm/model_executor/models/tiny.py:41: Other.__init__: upstream's own constructor cannot be followed: "
        "it builds no layer with experts on any path that was tried [construction]\n"
        "  do: serve this family unsplit: its constructors need what the other role owns"
    )
