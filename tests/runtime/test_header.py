import pytest
import torch

from afd_runtime.errors import WireError
from afd_runtime.header import MAGIC, SIZE, Header, parse_header


def test_a_header_survives_the_wire() -> None:
    tensor = Header(sequence=7, tokens=12).to_tensor()
    assert (tensor.dtype, tensor.shape) == (torch.int64, (SIZE,))
    assert parse_header(tensor, expected_sequence=7, max_tokens=12) == Header(7, 12)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            (MAGIC + 1, 7, 12, 0),
            "step header: magic 0x41464402, expected 0x41464401; do both roles run the same afd-compiler?",
        ),
        ((MAGIC, 8, 12, 0), "step header: sequence number 8, expected 7; a step was lost"),
        ((MAGIC, 7, 0, 0), "step header: 0 tokens, expected 1 to 12"),
        ((MAGIC, 7, 13, 0), "step header: 13 tokens, expected 1 to 12"),
        ((MAGIC, 7, 12, 4), "step header: flags 0x4, but this release knows none"),
    ],
)
def test_what_no_step_starts_with(numbers: tuple[int, ...], text: str) -> None:
    with pytest.raises(WireError) as error:
        parse_header(torch.tensor(numbers), expected_sequence=7, max_tokens=12)
    assert str(error.value) == text
