"""Judges mutants: upstream source with one small semantic edit must be refused, or be proved as what it now is.

A mutant is killed if the compiler refuses it with a place in the edited file, or emits a wrapper that is proved equal
to the *edited* source and whose behaviour differs from the original's. Anything else survives: a crash, a refusal
without a place, or a wrapper that behaves as if the edit were not there.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from afd_compiler.outcome import Compiled, Outcome
from afd_compiler.pipeline import compile_family
from afd_compiler.source import SourceTree, find_source
from afd_compiler.spec import load_spec
from tests.mutants.mutations import Mutant, mutants_of

RELEASES = ("0.19.1", "0.26.0", "0.32.0")


FAMILIES = ("deepseek_v2",)
"""The families whose layers are edited; it has the most variants."""


@dataclass(frozen=True, slots=True)
class Job:
    """One mutant of one family in one release."""

    family: str
    release: str
    mutant: Mutant


@dataclass(frozen=True, slots=True)
class Verdict:
    job: Job
    killed: bool
    how: str

    def __str__(self) -> str:
        mutant = self.job.mutant
        return f"{self.job.release} {self.job.family}:{mutant.line} {mutant.what}: {self.how}"


def jobs_of(releases: Iterable[str] = RELEASES, families: Iterable[str] = FAMILIES) -> Iterator[Job]:
    """Every mutant of every family."""
    for release in releases:
        for family in families:
            original = _original(family, release)
            text = find_source(release).text(load_spec(family).module)
            yield from (Job(family, release, mutant) for mutant in mutants_of(text, original.classes.layers[0].name))


def judge(job: Job) -> Verdict:
    """Compile one mutant."""
    spec, original = load_spec(job.family), _original(job.family, job.release)
    overlay = _overlay(spec.module, job.release)
    path = overlay.path_of(spec.module)
    assert path is not None  # the overlay was made for this module
    path.write_text(job.mutant.text, encoding="utf-8")
    try:
        outcome = compile_family(spec, overlay, "cpu")
    except Exception as error:
        return Verdict(job, killed=False, how=f"crashed: {type(error).__name__}: {error}")
    return Verdict(job, *_judged(outcome, original))


def judge_all(jobs: Iterable[Job]) -> Iterator[Verdict]:
    """Side by side on all cores."""
    with ProcessPoolExecutor() as pool:
        yield from pool.map(judge, jobs, chunksize=4)


def _judged(outcome: Outcome, original: Compiled) -> tuple[bool, str]:
    if isinstance(outcome, Compiled):
        differs = [item.proof.behaviour for item in outcome.layers] != [
            item.proof.behaviour for item in original.layers
        ]
        return differs, "proved as edited" if differs else "the wrapper behaves as if the edit were not there"
    placed = outcome.reason.at.file == original.classes.location.file and outcome.reason.at.line > 0
    return placed, f"refused ({outcome.reason.kind.value})" if placed else f"refused without a place: {outcome.reason}"


@cache
def _original(family: str, release: str) -> Compiled:
    outcome = compile_family(load_spec(family), find_source(release), "cpu")
    assert isinstance(outcome, Compiled), outcome
    return outcome


@cache
def _overlay(module: str, release: str) -> SourceTree:
    """The release's tree by links, but for one file, which is this process's own."""
    native = find_source(release)
    root = Path(mkdtemp(prefix="afd-mutants-"))
    here, there = root, native.root
    for part in module.split("."):
        for entry in there.iterdir():
            if entry.name not in (part, f"{part}.py"):
                (here / entry.name).symlink_to(entry)
        here, there = here / part, there / part
        if there.is_dir():
            here.mkdir()
    (root.joinpath(*module.split("."))).with_suffix(".py").touch()
    return SourceTree(root, native.release)


def main() -> int:
    """Judge the whole corpus; the last line is the score, and the exit status 1 if a mutant survives."""
    jobs = list(jobs_of())
    print(f"{len(jobs)} mutants", flush=True)
    outcomes: Counter[str] = Counter()
    survivors = []
    for done, verdict in enumerate(judge_all(jobs), start=1):
        outcomes[verdict.how if verdict.killed else "survived"] += 1
        if not verdict.killed:
            survivors.append(verdict)
            print(f"alive: {verdict}", flush=True)
        if done % 50 == 0:
            print(f"  {done} of {len(jobs)}, {len(survivors)} alive", flush=True)
    print("\n".join(f"{count:5} {how}" for how, count in outcomes.most_common()))
    killed = len(jobs) - len(survivors)
    print(f"killed {killed} of {len(jobs)} ({100 * killed / len(jobs):.4g} %)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
