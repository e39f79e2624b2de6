"""Compiles several families of one or more releases at once, one process for each processor core."""

import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache

from afd_compiler.constructs import Constructs
from afd_compiler.outcome import Outcome, Result
from afd_compiler.pipeline import compile_among
from afd_compiler.source import SourceTree
from afd_compiler.spec import Spec
from afd_compiler.symbols import Symbols


def compile_families(specs: Sequence[Spec], trees: Sequence[SourceTree], platform: str) -> Iterator[Outcome]:
    """The outcome of each spec as soon as it is there, in any order; one release after the other, best by age."""
    before: dict[Spec, Result] = {}
    if len(specs) * len(trees) == 1:
        yield _compile(specs[0], trees[0], platform, None).outcome
        return
    for tree in trees:
        # Processes for one release each: they end soon, and until then their garbage costs less than the search for it.
        with ProcessPoolExecutor(os.cpu_count(), initializer=gc.disable) as pool:
            # The longest first, so that no process is left alone with one at the end; long sources take long.
            longest_first = sorted(specs, key=lambda spec: -_length(spec, tree))
            work = [pool.submit(_compile, spec, tree, platform, before.get(spec)) for spec in longest_first]
            for done in as_completed(work):
                result = done.result()
                before[result.outcome.origin.spec] = result
                yield result.outcome


def _compile(spec: Spec, tree: SourceTree, platform: str, before: Result | None) -> Result:
    return compile_among(spec, _lookup(tree, platform), before)


@lru_cache(maxsize=1)
def _lookup(tree: SourceTree, platform: str) -> Constructs:
    """This process's."""
    return Constructs(Symbols(tree, platform))


def _length(spec: Spec, tree: SourceTree) -> int:
    path = tree.path_of(spec.module)
    return path.stat().st_size if path else 0
