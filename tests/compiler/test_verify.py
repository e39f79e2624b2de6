"""Translation validation: a wrong wrapper is refused, with the two places that differ."""

from collections.abc import Callable

import pytest

from afd_compiler import verify as verify_pass
from afd_compiler.classes import classify
from afd_compiler.construction import check_construction, find_settings
from afd_compiler.constructs import Constructs
from afd_compiler.diagnostics import Refused
from afd_compiler.outcome import Compiled
from afd_compiler.partition import partition
from afd_compiler.sandbox import Sandbox
from afd_compiler.source import SourceTree
from afd_compiler.symbols import Symbols
from afd_compiler.trace import trace

from .conftest import TINY, CompileTiny


def verify_edited(tree: SourceTree, text: str, *edits: tuple[str, str]) -> verify_pass.Proof:
    """Verify an emitted text after it was tampered with."""
    symbols = Symbols(tree, "cpu")
    classes = classify(TINY, Constructs(symbols))
    (layer,) = classes.layers
    index = symbols.index(classes.module)
    assert index is not None
    sandbox = Sandbox(symbols, classes.opened)
    sandbox.make_leaves([layer.symbol])
    traces = {layer: trace(layer, sandbox)}
    forward = index.method(layer.name, "forward")
    assert forward is not None
    cut, *_ = partition(layer, traces[layer], forward, index.names)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    emitted = verify_pass.load_emitted(sandbox, text)
    verify_pass.check_module(classes, sandbox, emitted, text)
    proof = verify_pass.verify(layer, cut, traces[layer], sandbox, emitted)
    settings = find_settings(classes, symbols, traces)
    whole = verify_pass.load_emitted(settings.sandbox, text)
    for setting in settings.found:
        check_construction(classes, setting, settings.sandbox, whole)
    return proof


@pytest.fixture
def emitted(compile_tiny: CompileTiny) -> str:
    outcome = compile_tiny()
    assert isinstance(outcome, Compiled), outcome
    return outcome.text


def test_untouched_text_is_proved(tiny_tree: Callable[..., SourceTree], emitted: str) -> None:
    proof = verify_edited(tiny_tree(), emitted)
    assert [check.name for check in proof.checks] == ["translation", "weight-cover", "capture-safety"]
    assert len(proof.variants) == 12


RESCALE = "            hidden_states *= 1.0 / self.scale\n"
TAMPERED = {
    "an embedding built by the FFN": (
        ("Embedding=Unowned, ", ""),
        "the ffn role builds model.embed_tokens, which attention owns",
    ),
    "layers left whole": (
        ("TinyDecoderLayer=FFNTinyDecoderLayer", "TinyMLP=FFNTinyDecoderLayer"),
        "built no split layer",
    ),
    "a dropped keyword": (
        ("self.ffn(hidden_states, scaled=True)", "self.ffn(hidden_states)"),
        "became `call_module ffn`",
    ),
    "a lost rescale": ((RESCALE, "            pass\n"), "is done by neither half"),
    "a rescale out of place": (
        ("hidden_states *= 1.0 /", "hidden_states = hidden_states * 1.0 /"),
        "is done by neither",
    ),
    "a rescale by the inverse": (
        ("*= 1.0 / self.scale", "/= 1.0 / self.scale"),
        "became `call_function _operator.itruediv`",
    ),
    "a second call": (
        ("        return hidden_states\n", "        return self.ffn(hidden_states)\n"),
        "upstream does not do",
    ),
    "a changed result": (
        ("        return hidden_states\n", "        return hidden_states + 1\n"),
        "returns other values",
    ),
    "no exchange": (("return self.exchange(hidden_states)", "return hidden_states"), "makes 0 exchanges"),
    "two exchanges": (
        ("return self.exchange(hidden_states)", "return self.exchange(self.exchange(hidden_states))"),
        "makes 2 exchanges",
    ),
    "the FFN built by attention": (("TinyMoE=RemoteFfn", "TinyModel=RemoteFfn"), "makes 0 exchanges"),
    "attention built by the FFN": (("TinyAttention=Unowned", "FusedMoE=Unowned"), "is built by attention and ffn"),
    "a host read": (
        ("        return hidden_states\n", "        hidden_states.item()\n        return hidden_states\n"),
        "reads a",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_text_is_refused(tiny_tree: Callable[..., SourceTree], emitted: str, what: str) -> None:
    edit, reason = TAMPERED[what]
    with pytest.raises(Refused) as refusal:
        verify_edited(tiny_tree(), emitted, edit)
    assert reason in str(refusal.value)
