"""Golden files are the checked-in wrappers themselves: bytes for the reviewer, proof for the machine."""

from collections.abc import Callable
from pathlib import Path

import pytest

import afd_generated
from afd_compiler.outcome import Compiled
from afd_compiler.pipeline import compile_family
from afd_compiler.report import drift_of, files_of
from afd_compiler.source import SourceTree
from afd_compiler.spec import known_specs, load_spec

from .conftest import CompileTiny

GENERATED = Path(afd_generated.__file__).parent
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("family", known_specs())
def test_checked_in_wrappers_are_what_the_compiler_writes(release_tree: SourceTree, family: str) -> None:
    outcome = compile_family(load_spec(family), release_tree, "cpu")
    assert isinstance(outcome, Compiled), outcome
    assert drift_of(files_of(outcome), GENERATED) == ()
    assert len(outcome.text.splitlines()) <= 120


def test_the_tiny_model(compile_tiny: CompileTiny) -> None:
    outcome = compile_tiny()
    assert isinstance(outcome, Compiled), outcome
    assert outcome.text == (GOLDEN / "tiny.py").read_text()


def test_what_follows_the_ffn_alone_goes_with_it(compile_tiny: CompileTiny) -> None:
    last = "        return hidden_states, residual\n\n\nclass TinyModel"
    doubled = "        if isinstance(self.ffn, TinyMoE):\n            hidden_states = torch.tanh(hidden_states)\n"
    outcome = compile_tiny((last, doubled + last))
    assert isinstance(outcome, Compiled), outcome
    assert "hidden_states = torch.tanh(hidden_states)" in outcome.text
    assert dict(outcome.cut.owners) == {
        "self_attn": "attention",
        "norm1": "attention",
        "norm2": "attention",
        "ffn": "ffn",
    }


def test_emitted_text_names_nothing_of_the_machine(
    compile_tiny: CompileTiny, tiny_tree: Callable[..., SourceTree], tmp_path: Path
) -> None:
    outcome = compile_tiny()
    assert isinstance(outcome, Compiled), outcome
    for file in files_of(outcome):
        assert str(tmp_path) not in file.text


def test_a_submodule_whose_class_is_a_class_attribute(compile_tiny: CompileTiny) -> None:
    """No global name is looked up when it is built, so the emitted layer overrides the attribute."""
    outcome = compile_tiny(
        ("class TinyDecoderLayer(nn.Module):\n", "class TinyDecoderLayer(nn.Module):\n    moe_cls: type = TinyMoE\n\n"),
        (
            'self.ffn = TinyMoE(config, prefix=f"{prefix}.ffn")',
            'self.ffn = self.moe_cls(config, prefix=f"{prefix}.ffn")',
        ),
        (
            '            self.ffn = TinyMLP(config.size, prefix=f"{prefix}.ffn")\n',
            "            raise ValueError(config)\n",
        ),
    )
    assert isinstance(outcome, Compiled), outcome
    assert "class AttentionDecoderLayer(upstream.TinyDecoderLayer):\n    moe_cls = RemoteFfn\n" in outcome.text


def test_a_layer_class_that_is_a_parameter_of_the_model(compile_tiny: CompileTiny) -> None:
    """The default was evaluated before any name is bound, so the emitted role passes the argument."""
    outcome = compile_tiny(
        ('class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix=""):',
         'class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix="", kind=TinyDecoderLayer):'),
        ("TinyDecoderLayer(vllm_config, prefix=prefix)", "kind(vllm_config, prefix=prefix)"),
    )  # fmt: skip
    assert isinstance(outcome, Compiled), outcome
    assert "TinyModel=partial(upstream.TinyModel, kind=FFNDecoderLayer)," in outcome.text


def test_a_layer_class_that_is_a_parameter_of_the_causal_lm(compile_tiny: CompileTiny) -> None:
    head = 'class TinyForCausalLM(nn.Module):\n    def __init__(self, *, vllm_config, prefix=""'
    outcome = compile_tiny(
        (f"{head}):", f"{head}, kind=TinyDecoderLayer):"),
        ("TinyModel(vllm_config=vllm_config)", "TinyModel(vllm_config=vllm_config, kind=kind)"),
        ('class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix=""):',
         'class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix="", kind=TinyDecoderLayer):'),
        ("TinyDecoderLayer(vllm_config, prefix=prefix)", "kind(vllm_config, prefix=prefix)"),
    )  # fmt: skip
    assert isinstance(outcome, Compiled), outcome
    assert "super().__init__(vllm_config=vllm_config, prefix=prefix, kind=AttentionDecoderLayer)" in outcome.text
