"""The connector nodes as torch operators, opaque to `torch.compile` and graph capture.

Both are functional. A ticket, an empty tensor, makes each hop depend on the one before it, so that a compiler neither
drops nor reorders them. What a hop does is up to the process's link (`afd_runtime.link`), found when the operator runs.
"""

import torch

_library = torch.library.Library("afd", "DEF")
_library.define("send(Tensor x, int layer, bool opens_step) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "recv(Tensor ticket, SymInt tokens, int hidden, ScalarType dtype, int layer) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _send_fake(x: torch.Tensor, layer: int, opens_step: bool) -> torch.Tensor:
    return x.new_empty(0)


def _recv_fake(ticket: torch.Tensor, tokens: int, hidden: int, dtype: torch.dtype, layer: int) -> torch.Tensor:
    return ticket.new_empty((tokens, hidden), dtype=dtype)


def _send(x: torch.Tensor, layer: int, opens_step: bool) -> torch.Tensor:
    from afd_runtime.link import current

    current().send(x.contiguous(), layer, opens_step)
    return x.new_empty(0)


def _recv(ticket: torch.Tensor, tokens: int, hidden: int, dtype: torch.dtype, layer: int) -> torch.Tensor:
    from afd_runtime.link import current

    received = ticket.new_empty((tokens, hidden), dtype=dtype)
    current().recv(received, layer)
    return received


for _name, _impl, _fake in (("send", _send, _send_fake), ("recv", _recv, _recv_fake)):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"afd::{_name}", _fake)


def send(x: torch.Tensor, layer: int, opens_step: bool = False) -> torch.Tensor:
    """Send [tokens, hidden] of a layer to the other role; return the ticket, an empty tensor of x's device."""
    ticket: torch.Tensor = torch.ops.afd.send(x, layer, opens_step)
    return ticket


def recv(ticket: torch.Tensor, tokens: int, hidden: int, dtype: torch.dtype, layer: int) -> torch.Tensor:
    """Receive [tokens, hidden] of a layer from the other role, after the hop that gave the ticket."""
    received: torch.Tensor = torch.ops.afd.recv(ticket, tokens, hidden, dtype, layer)
    return received
