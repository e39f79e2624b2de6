"""Releases alike in what a family rests on are compiled once; anything that matters makes them differ."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from afd_compiler import pipeline
from afd_compiler.batch import compile_families
from afd_compiler.constructs import Constructs
from afd_compiler.outcome import Compiled, Refusal
from afd_compiler.pipeline import compile_among
from afd_compiler.report import files_of
from afd_compiler.source import SourceTree
from afd_compiler.symbols import Symbols
from tests.compiler.conftest import TINY, TINY_FILE

NORM = "vllm/model_executor/layers/layernorm.py"
CALL = "            hidden_states = self.ffn(hidden_states)\n"
DIFFERENT = {
    "nothing": ({}, True),
    "what no layer uses": ({"vllm/other.py": "x = 1\n", "vllm/platforms.py": "current_platform = 1\n"}, True),
    "how a norm works": ({NORM: "from torch import nn\nclass RMSNorm(nn.Module):\n    x = 1\n"}, True),
    "a norm that is no module any more": ({NORM: "class RMSNorm: ...\n"}, False),
    "the model's file": ({TINY_FILE: None}, False),
}
"""What differs in the new release -> whether the old one's result holds for it."""


@pytest.fixture
def releases(tiny_tree: Callable[..., SourceTree], tmp_path: Path) -> Callable[..., list[SourceTree]]:
    """9.9.9, and 9.9.10 with other files."""

    def write(files: dict[str, str | None]) -> list[SourceTree]:
        old = tiny_tree()
        root = tmp_path / "new"
        copytree(old.root, root)
        for path, text in files.items():
            before = (root / path).read_text() if (root / path).exists() else ""
            (root / path).write_text(f"{before}\n# A line more.\n" if text is None else text)
        return [old, SourceTree(root, "9.9.10")]

    return write


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_makes_a_release_another(
    releases: Callable[..., list[SourceTree]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    files, alike = DIFFERENT[what]
    old, new = releases(files)
    before = compile_among(TINY, Constructs(Symbols(old, "cpu")))
    compiled = []
    monkeypatch.setattr(pipeline, "trace", lambda *args, real=pipeline.trace: compiled.append(args) or real(*args))
    after = compile_among(TINY, Constructs(Symbols(new, "cpu")), before)
    assert bool(compiled) is not alike
    assert after.outcome.origin.release == "9.9.10"


def test_a_result_that_holds_gives_the_files_that_compiling_gives(releases: Callable[..., list[SourceTree]]) -> None:
    trees = releases({})
    once, again = compile_families([TINY], trees, "cpu")
    (alone,) = compile_families([TINY], trees[1:], "cpu")
    assert isinstance(once, Compiled)
    assert isinstance(again, Compiled)
    assert isinstance(alone, Compiled)
    assert files_of(again) == files_of(alone) != files_of(once)


def test_a_refusal_holds_too(tiny_tree: Callable[..., SourceTree]) -> None:
    tree = tiny_tree((CALL, f"            for _ in (1,):\n    {CALL}"))
    before = compile_among(TINY, Constructs(Symbols(tree, "cpu")))
    after = compile_among(TINY, Constructs(Symbols(SourceTree(tree.root, "9.9.10"), "cpu")), before)
    assert isinstance(before.outcome, Refusal)
    assert isinstance(after.outcome, Refusal)
    assert after.outcome.reason is before.outcome.reason
    assert after.outcome.origin.release == "9.9.10"
