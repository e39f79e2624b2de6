"""A sample of the corpus; `make mutants` judges all of it."""

import ast

import pytest

from afd_compiler.source import find_source
from afd_compiler.spec import load_spec
from tests.mutants.corpus import RELEASES, jobs_of, judge
from tests.mutants.mutations import mutants_of

EVERY = 40
LAYER = """
class Layer:
    def __init__(self, config):
        self.mlp = MLP(config, reduce_results=True)

    def forward(self, x, residual):
        x = self.mlp(x)
        return x, residual
"""


@pytest.mark.parametrize("release", RELEASES)
def test_sampled_mutants_are_killed(release: str) -> None:
    jobs = list(jobs_of((release,)))
    assert len(jobs) > 200
    verdicts = [judge(job) for job in jobs[::EVERY]]
    assert [str(verdict) for verdict in verdicts if not verdict.killed] == []


def test_an_edit_without_effect_survives_the_judge() -> None:
    """Guards the corpus: a wrapper that behaves like the original's is told from one that does not."""
    (job, *_) = jobs_of((RELEASES[-1],))
    text = find_source(job.release).text(load_spec(job.family).module)
    verdict = judge(type(job)(job.family, job.release, type(job.mutant)("add a comment", 1, f"{text}\n# nothing\n")))
    assert (verdict.killed, verdict.how) == (False, "the wrapper behaves as if the edit were not there")


def test_mutants_are_edits_of_one_place() -> None:
    found = list(mutants_of(LAYER, "Layer"))
    assert len({mutant.text for mutant in found}) == len(found)
    kinds = {mutant.what for mutant in found}
    assert {"drop a statement", "drop a keyword", "rename a keyword", "un-reduce the output", "call twice"} <= kinds
    assert {"return a third value", "swap what is returned", "add a branch on a new flag", "another variable"} <= kinds
    for mutant in found:
        ast.parse(mutant.text)
        assert mutant.text.splitlines()[1:3] == LAYER.splitlines()[1:3]
