"""One model of each family, served unsplit and split; the servers of one are stopped before the next is started."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.checkpoint import count_parameters
from tests.e2e.deployment import EAGER_AT_ONCE, Deployment, deploy
from tests.models.checkpoints import BROKEN, FAMILIES, Family, write_checkpoint

QUICK = frozenset({"qwen3_moe", "gpt_oss"})
"""Families that `make test` serves beside the end-to-end tests' DeepSeek-V2."""


def families() -> Iterator[object]:
    for family in FAMILIES:
        marks = [] if family.name in QUICK else [pytest.mark.slow]
        if reason := BROKEN.get(family.name):
            marks.append(pytest.mark.skip(reason=reason))
        yield pytest.param(family, id=family.name, marks=marks)


@pytest.fixture(scope="module", params=families())
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture(scope="module")
def checkpoint(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(family.name), family)


@pytest.fixture(scope="module")
def checkpoint_parameters(checkpoint: Path) -> int:
    return count_parameters(checkpoint)


@pytest.fixture(scope="module")
def servers(checkpoint: Path, family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deploy(checkpoint, EAGER_AT_ONCE, tmp_path_factory.mktemp(f"logs-{family.name}")) as deployed:
        yield deployed


@pytest.fixture
def deployment(servers: Deployment) -> Iterator[Deployment]:
    """A test during which a server ends fails with that server's log, and so do those that follow, at once."""
    servers.check()
    yield servers
    servers.check()
