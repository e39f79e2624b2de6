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
