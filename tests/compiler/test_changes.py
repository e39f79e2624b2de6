"""What a reviewer reads about two releases, for each way in which a layer can change between them."""

import pytest

from afd_compiler.changes import Difference, Verdict, change_between
from tests.compiler.conftest import CompileTiny

CALL = "hidden_states = self.ffn(hidden_states)\n"
REFUSED = (f"            {CALL}", f"            for _ in (1,):\n                {CALL}")
"""Work of the FFN in a loop has no form."""
MOVED = ("class TinyDecoderLayer(", "# A line more.\nclass TinyDecoderLayer(")
OTHER_NORM = ("self.norm1(hidden_states, residual)", "self.norm1(hidden_states, residual + residual)")
NEW_NAME = ("self.ffn(hidden_states, scaled=True)", "self.ffn(hidden_states, scaled=False)")


def test_moved_lines_are_no_change(compile_tiny: CompileTiny) -> None:
    change = change_between(compile_tiny(), compile_tiny(MOVED))
    assert (change.verdict, change.differences, change.same_behaviour) == (Verdict.SAME_CUT, (), True)
    assert change.conclusion.startswith("wrapper unchanged in behaviour")


def test_work_around_the_cut_is_told_from_the_cut(compile_tiny: CompileTiny) -> None:
    change = change_between(compile_tiny(), compile_tiny(OTHER_NORM))
    assert (change.verdict, change.differences, change.same_behaviour) == (Verdict.SAME_CUT, (), False)
    assert change.conclusion == ("wrapper cut the same; what upstream's layer does around the cut is not what it was")


def test_another_call_is_another_cut_shown_with_the_old(compile_tiny: CompileTiny) -> None:
    change = change_between(compile_tiny(), compile_tiny(NEW_NAME))
    assert (change.verdict, change.same_behaviour) == (Verdict.CHANGED_CUT, False)
    assert change.conclusion == "wrapper changed: review the cut"
    (cut,) = [item for item in change.differences if item.what == "cut"]
    assert cut == Difference(
        "TinyDecoderLayer",
        "cut",
        ("self.ffn(hidden_states, scaled=True)", "self.ffn(hidden_states)"),
        ("self.ffn(hidden_states, scaled=False)", "self.ffn(hidden_states)"),
    )


@pytest.mark.parametrize(
    ("old", "new", "verdict", "conclusion"),
    [
        ((), (REFUSED,), Verdict.NEWLY_REFUSED, "no wrapper for the new release"),
        ((REFUSED,), (), Verdict.NEWLY_PROVED, "wrapper is new: review it whole"),
        ((REFUSED,), (REFUSED,), Verdict.REFUSED, "no wrapper for the new release"),
    ],
)
def test_refusals(compile_tiny: CompileTiny, old: tuple, new: tuple, verdict: Verdict, conclusion: str) -> None:
    change = change_between(compile_tiny(*old), compile_tiny(*new))
    assert (change.verdict, change.conclusion, change.same_behaviour) == (verdict, conclusion, False)
    assert ("FFN work inside a `For` statement [no-form]" in (change.reason or "")) == bool(new)
