"""vLLM's distributed environment of one process, and its registry without the subprocesses that inspect a model."""

from collections.abc import Iterator

import pytest

from tests.in_process import without_inspection, world_of_one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process for the folder under `--dist loadgroup`: importing vLLM takes longer than all of its tests."""
    for item in items:
        if item.path.parent.name == "proof":
            item.add_marker(pytest.mark.xdist_group("proof"))


@pytest.fixture(scope="package", autouse=True)
def vllm_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with world_of_one(tmp_path_factory.mktemp("distributed")):
        from tests.proof.families import AROUND, FAMILIES

        for family in (*FAMILIES, AROUND):
            without_inspection(family.architecture)
        yield
