"""The header: the small fixed-size tensor that opens a step, sent before the step's first hop."""

from dataclasses import dataclass

import torch

from afd_runtime.errors import WireError

MAGIC = 0x41464401
"""Says "AFD", and the format 1 in its last byte."""
SIZE = 4
"""int64 numbers: magic, sequence number, tokens, flags. No flag is defined yet."""


@dataclass(frozen=True, slots=True)
class Header:
    sequence: int
    """Of the step within its session, from 0 without gaps."""
    tokens: int

    def to_tensor(self) -> torch.Tensor:
        """int64 [SIZE]."""
        return torch.tensor((MAGIC, self.sequence, self.tokens, 0), dtype=torch.int64)


def parse_header(tensor: torch.Tensor, expected_sequence: int, max_tokens: int) -> Header:
    """Read int64 [SIZE]; raise `WireError` for anything that a step of this session cannot start with."""
    magic, sequence, tokens, flags = tensor.tolist()
    if magic != MAGIC:
        raise WireError(f"step header: magic {magic:#x}, expected {MAGIC:#x}; do both roles run the same afd-compiler?")
    if sequence != expected_sequence:
        raise WireError(f"step header: sequence number {sequence}, expected {expected_sequence}; a step was lost")
    if not 0 < tokens <= max_tokens:
        raise WireError(f"step header: {tokens} tokens, expected 1 to {max_tokens}")
    if flags != 0:
        raise WireError(f"step header: flags {flags:#x}, but this release knows none")
    return Header(sequence, tokens)
