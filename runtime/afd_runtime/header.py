"""The header: the small fixed-size tensor that opens a step, sent before the step's first hop."""

from dataclasses import dataclass

import torch

from afd_runtime.errors import WireError

MAGIC = 0x41464402
"""Says "AFD", and the format 2 in its last byte."""
MOST_EXTRAS = 4
"""Values beside the hidden states that a layer may send; none of vLLM's has more than two."""
SIZE = 4 + 2 * MOST_EXTRAS
"""int64 numbers: magic, sequence number, tokens, number of extras; then dtype and columns of each extra."""
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)
"""What can cross, by its number on the wire."""
ABSENT = -1
"""The number of an extra that is `None` in this step."""


@dataclass(frozen=True, slots=True)
class Extra:
    """How an extra looks in one step: [tokens], or [tokens, columns] where there are columns."""

    dtype: torch.dtype
    columns: int

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens, self.columns) if self.columns else (tokens,)


def describe(value: torch.Tensor | None, tokens: int) -> Extra | None:
    """How a value of this step is announced; raise `WireError` for one that cannot cross."""
    if value is None:
        return None
    if value.dtype not in DTYPES or value.dim() not in (1, 2) or value.shape[0] != tokens or 0 in value.shape[1:]:
        raise WireError(f"a {value.dtype} tensor of shape {tuple(value.shape)} cannot cross beside {tokens} tokens")
    return Extra(value.dtype, value.shape[1] if value.dim() == 2 else 0)


@dataclass(frozen=True, slots=True)
class Header:
    sequence: int
    """Of the step within its session, from 0 without gaps."""
    tokens: int
    extras: tuple[Extra | None, ...] = ()
    """What each layer sends besides the hidden states, the same for all layers of a step."""

    def to_tensor(self) -> torch.Tensor:
        """int64 [SIZE]."""
        told = [(DTYPES.index(extra.dtype), extra.columns) if extra else (ABSENT, 0) for extra in self.extras]
        told += [(ABSENT, 0)] * (MOST_EXTRAS - len(told))
        numbers = (MAGIC, self.sequence, self.tokens, len(self.extras), *(number for pair in told for number in pair))
        return torch.tensor(numbers, dtype=torch.int64)


def parse_header(tensor: torch.Tensor, expected_sequence: int, max_tokens: int, extras: int = 0) -> Header:
    """Read int64 [SIZE]; raise `WireError` for anything that a step of this session cannot start with."""
    magic, sequence, tokens, count, *told = tensor.tolist()
    if magic != MAGIC:
        raise WireError(f"step header: magic {magic:#x}, expected {MAGIC:#x}; do both roles run the same afd-compiler?")
    if sequence != expected_sequence:
        raise WireError(f"step header: sequence number {sequence}, expected {expected_sequence}; a step was lost")
    if not 0 < tokens <= max_tokens:
        raise WireError(f"step header: {tokens} tokens, expected 1 to {max_tokens}")
    if count != extras:
        raise WireError(f"step header: {count} values beside the hidden states, expected {extras}")
    pairs = list(zip(told[::2], told[1::2], strict=True))[:count]
    return Header(sequence, tokens, tuple(_extra(*pair) for pair in pairs))


def _extra(code: int, columns: int) -> Extra | None:
    if not ABSENT <= code < len(DTYPES) or columns < 0:
        raise WireError(f"step header: dtype number {code} with {columns} columns, which this release does not know")
    return None if code == ABSENT else Extra(DTYPES[code], columns)
