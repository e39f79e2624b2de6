import pytest
import torch

from afd_runtime.errors import WireError
from afd_runtime.header import DTYPES, MAGIC, SIZE, Extra, Header, describe, parse_header


def test_a_header_survives_the_wire() -> None:
    tensor = Header(sequence=7, tokens=12).to_tensor()
    assert (tensor.dtype, tensor.shape) == (torch.int64, (SIZE,))
    assert parse_header(tensor, expected_sequence=7, max_tokens=12) == Header(7, 12)


def test_a_header_says_what_goes_with_the_hidden_states() -> None:
    values = (torch.zeros(12, dtype=torch.int32), None, torch.zeros(12, 3, dtype=torch.bool))
    told = tuple(describe(value, 12) for value in values)
    assert told == (Extra(torch.int32, 0), None, Extra(torch.bool, 3))
    header = Header(7, 12, told)
    assert parse_header(header.to_tensor(), expected_sequence=7, max_tokens=12, extras=3) == header
    assert [extra and extra.shape(12) for extra in told] == [(12,), None, (12, 3)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(11), "a torch.float32 tensor of shape (11,) cannot cross beside 12 tokens"),
        (torch.zeros(12, 2, 2), "a torch.float32 tensor of shape (12, 2, 2) cannot cross beside 12 tokens"),
        (torch.zeros(12, 0), "a torch.float32 tensor of shape (12, 0) cannot cross beside 12 tokens"),
        (
            torch.zeros(12, dtype=torch.complex64),
            "a torch.complex64 tensor of shape (12,) cannot cross beside 12 tokens",
        ),
    ],
)
def test_what_cannot_cross(value: torch.Tensor, text: str) -> None:
    with pytest.raises(WireError) as error:
        describe(value, 12)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            (MAGIC + 1, 7, 12, 1),
            "step header: magic 0x41464403, expected 0x41464402; do both roles run the same afd-compiler?",
        ),
        ((MAGIC, 8, 12, 1), "step header: sequence number 8, expected 7; a step was lost"),
        ((MAGIC, 7, 0, 1), "step header: 0 tokens, expected 1 to 12"),
        ((MAGIC, 7, 13, 1), "step header: 13 tokens, expected 1 to 12"),
        ((MAGIC, 7, 12, 4), "step header: 4 values beside the hidden states, expected 1"),
        (
            (MAGIC, 7, 12, 1, len(DTYPES), 0),
            "step header: dtype number 7 with 0 columns, which this release does not know",
        ),
        ((MAGIC, 7, 12, 1, 1, -1), "step header: dtype number 1 with -1 columns, which this release does not know"),
    ],
)
def test_what_no_step_starts_with(numbers: tuple[int, ...], text: str) -> None:
    tensor = torch.tensor(numbers + (0,) * (SIZE - len(numbers)))
    with pytest.raises(WireError) as error:
        parse_header(tensor, expected_sequence=7, max_tokens=12, extras=1)
    assert str(error.value) == text
