"""Servers that the end-to-end tests share: starting one takes a minute of processor time, so there are few."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.checkpoint import Size, count_parameters, write_checkpoint
from tests.e2e.deployment import COMPILED_FLOAT32, EAGER, Deployment, deploy


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), Size())


@pytest.fixture(scope="session", params=[EAGER, COMPILED_FLOAT32], ids=lambda mode: mode.name)
def deployment(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Both ways of serving the checkpoint, in the two modes in which they must be equal to the last bit."""
    with deploy(checkpoint, request.param, tmp_path_factory.mktemp(f"logs-{request.param.name}")) as deployed:
        yield deployed


@pytest.fixture(scope="session")
def checkpoint_parameters(checkpoint: Path) -> int:
    return count_parameters(checkpoint)
