"""Compiles several families at once, one process for each processor core."""

import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache

from afd_compiler.constructs import Constructs
from afd_compiler.outcome import Outcome
from afd_compiler.pipeline import compile_among
from afd_compiler.source import SourceTree
from afd_compiler.spec import Spec
from afd_compiler.symbols import Symbols


def compile_families(specs: Sequence[Spec], tree: SourceTree, platform: str) -> Iterator[Outcome]:
    """The outcome of each spec as soon as it is there, in any order."""
    if len(specs) == 1:
        yield _compile(specs[0], tree, platform)
        return
    # The longest first, so that no process is left alone with one at the end; long sources take long.
    longest_first = sorted(specs, key=lambda spec: -_length(spec, tree))
    # The processes end soon; until then their garbage costs less than the search for it.
    with ProcessPoolExecutor(os.cpu_count(), initializer=gc.disable) as pool:
        work = [pool.submit(_compile, spec, tree, platform) for spec in longest_first]
        yield from (done.result() for done in as_completed(work))


def _compile(spec: Spec, tree: SourceTree, platform: str) -> Outcome:
    return compile_among(spec, _lookup(tree, platform))


@lru_cache(maxsize=1)
def _lookup(tree: SourceTree, platform: str) -> Constructs:
    """This process's."""
    return Constructs(Symbols(tree, platform))


def _length(spec: Spec, tree: SourceTree) -> int:
    path = tree.path_of(spec.module)
    return path.stat().st_size if path else 0
