"""Compiles several families at once, one process for each processor core."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from afd_compiler.outcome import Outcome
from afd_compiler.pipeline import compile_family
from afd_compiler.source import SourceTree
from afd_compiler.spec import Spec


def compile_families(specs: Sequence[Spec], tree: SourceTree, platform: str) -> Iterator[Outcome]:
    """The outcome of each spec, in order, as soon as it and those before it are there."""
    one = partial(compile_family, tree=tree, platform=platform)
    if len(specs) == 1:
        yield one(specs[0])
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(one, specs)
