"""The connector nodes as torch operators, opaque to `torch.compile` and graph capture.

All are functional. A ticket, an empty tensor, makes each hop depend on the one before it, so that a compiler neither
drops nor reorders them. What a hop does is up to the process's link (`afd_runtime.link`), found when the operator runs.
"""

from collections.abc import Sequence

import torch

from afd_runtime.errors import WireError
from afd_runtime.header import DTYPES, Extra

_library = torch.library.Library("afd", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define("send(Tensor x, Tensor?[] extras, int layer, bool opens_step) -> Tensor", tags=_TAGS)
_library.define(
    "recv(Tensor ticket, SymInt tokens, int hidden, ScalarType dtype, int layer) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "recv_all(Tensor ticket, SymInt tokens, int[] columns, int[] dtypes, int layer) -> Tensor[]",
    tags=_TAGS,
)


def _send_fake(x: torch.Tensor, extras: list[torch.Tensor | None], layer: int, opens_step: bool) -> torch.Tensor:
    return x.new_empty(0)


def _recv_fake(ticket: torch.Tensor, tokens: int, hidden: int, dtype: torch.dtype, layer: int) -> torch.Tensor:
    return ticket.new_empty((tokens, hidden), dtype=dtype)


def _recv_all_fake(
    ticket: torch.Tensor, tokens: int, columns: list[int], dtypes: list[int], layer: int
) -> list[torch.Tensor]:
    values = [Extra(DTYPES[number], width) for number, width in zip(dtypes, columns, strict=True)]
    return [ticket.new_empty(value.shape(tokens), dtype=value.dtype) for value in values]


def _send(x: torch.Tensor, extras: list[torch.Tensor | None], layer: int, opens_step: bool) -> torch.Tensor:
    from afd_runtime.link import current

    contiguous = [extra if extra is None else extra.contiguous() for extra in extras]
    current().send(x.contiguous(), contiguous, layer, opens_step)
    return x.new_empty(0)


def _recv(ticket: torch.Tensor, tokens: int, hidden: int, dtype: torch.dtype, layer: int) -> torch.Tensor:
    (received,) = _recv_all(ticket, tokens, [hidden], [DTYPES.index(dtype)], layer)
    return received


def _recv_all(
    ticket: torch.Tensor, tokens: int, columns: list[int], dtypes: list[int], layer: int
) -> list[torch.Tensor]:
    from afd_runtime.link import current

    received = _recv_all_fake(ticket, tokens, columns, dtypes, layer)
    for tensor in received:
        current().recv(tensor, layer)
    return received


for _name, _impl, _fake in (
    ("send", _send, _send_fake),
    ("recv", _recv, _recv_fake),
    ("recv_all", _recv_all, _recv_all_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"afd::{_name}", _fake)


def send(
    x: torch.Tensor, layer: int, opens_step: bool = False, extras: Sequence[torch.Tensor | None] = ()
) -> torch.Tensor:
    """Send [tokens, hidden] of a layer to the other role, and what goes with it; return the ticket, an empty tensor.

    Extras are [tokens] or [tokens, columns] of any dtype in `header.DTYPES`, or None. Raise `WireError` for any other.
    """
    for value in extras:
        if not isinstance(value, torch.Tensor | None):
            raise WireError(f"a {type(value).__name__} cannot cross to the FFN role, only tensors can")
    ticket: torch.Tensor = torch.ops.afd.send(x, list(extras), layer, opens_step)
    return ticket


def recv(ticket: torch.Tensor, tokens: int, hidden: int, dtype: torch.dtype, layer: int) -> torch.Tensor:
    """Receive [tokens, hidden] of a layer from the other role, after the hop that gave the ticket."""
    received: torch.Tensor = torch.ops.afd.recv(ticket, tokens, hidden, dtype, layer)
    return received


def recv_all(ticket: torch.Tensor, tokens: int, values: Sequence[Extra], layer: int) -> list[torch.Tensor]:
    """Receive several values of a layer, in the order in which they were sent: one node, so that none is dropped."""
    columns, dtypes = [value.columns for value in values], [DTYPES.index(value.dtype) for value in values]
    received: list[torch.Tensor] = torch.ops.afd.recv_all(ticket, tokens, columns, dtypes, layer)
    return received


def partial_sum(x: torch.Tensor) -> torch.Tensor:
    """This tensor-parallel rank's part of [tokens, hidden] that all ranks have: the first has it all, the others zeros.

    An all-reduce of the parts gives exactly x again.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    return x if get_tensor_model_parallel_rank() == 0 else torch.zeros_like(x)
