import pytest

from afd_runtime.topology import Topology


def test_ffn_ranks_come_first() -> None:
    topology = Topology(num_attention=3, num_ffn=2)
    assert [topology.rank("ffn", index) for index in range(2)] == [0, 1]
    assert [topology.rank("attention", index) for index in range(3)] == [2, 3, 4]
    assert topology.size == 5


@pytest.mark.parametrize(
    ("attention", "ffn", "blocks"),
    [(1, 1, [(0,)]), (4, 2, [(0, 1), (2, 3)]), (3, 2, [(0, 1), (2,)]), (5, 3, [(0, 1), (2, 3), (4,)])],
)
def test_attention_is_spread_in_contiguous_blocks(attention: int, ffn: int, blocks: list[tuple[int, ...]]) -> None:
    topology = Topology(attention, ffn)
    assert [topology.attention_of(index) for index in range(ffn)] == blocks
