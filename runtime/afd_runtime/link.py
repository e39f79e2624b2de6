"""The process's link to the other role: what the operators use, and who connects it, when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from afd_runtime.config import AFDConfig, parse_config
from afd_runtime.connectors import make_connector
from afd_runtime.connectors.base import Connector
from afd_runtime.errors import WireError
from afd_runtime.handshake import Facts, facts_of
from afd_runtime.header import Extra, Header, describe
from afd_runtime.log import init_logger

logger = init_logger(__name__)
Extras = Sequence[torch.Tensor | None]
"""What goes to the FFN beside the hidden states."""


class Link(Protocol):
    """Carries the hops of this process. Tensors are contiguous; the main one is [tokens, hidden]."""

    def send(self, x: torch.Tensor, extras: Extras, layer: int, opens_step: bool) -> None: ...

    def recv(self, out: torch.Tensor, layer: int) -> None: ...


class Loopback:
    """No peer: what is sent is dropped, what is received is zero. For the FFN role's warm-up."""

    def send(self, x: torch.Tensor, extras: Extras, layer: int, opens_step: bool) -> None:
        del x, extras, layer, opens_step

    def recv(self, out: torch.Tensor, layer: int) -> None:
        del layer
        out.zero_()


class FFNLink:
    """Hops of the FFN role over a connector that the FFN loop has connected."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    def send(self, x: torch.Tensor, extras: Extras, layer: int, opens_step: bool) -> None:
        del extras, opens_step
        self._connector.send(x, layer)

    def recv(self, out: torch.Tensor, layer: int) -> None:
        self._connector.recv(out, layer)


class AttentionLink:
    """Connects on the first exchange, so that either role may start first; opens each step with a header."""

    def __init__(self, config: AFDConfig, facts: Facts) -> None:
        self._config = config
        self._facts = facts
        self._connector: Connector | None = None
        self._sequence = 0
        self._announced: tuple[Extra | None, ...] = ()

    def send(self, x: torch.Tensor, extras: Extras, layer: int, opens_step: bool) -> None:
        connector = self._connected()
        tokens = x.shape[0]
        told = tuple(describe(extra, tokens) for extra in extras)
        if opens_step:
            connector.send_header(Header(self._sequence, tokens, told).to_tensor())
            self._sequence += 1
            self._announced = told
        if told != self._announced:
            raise WireError(
                f"layer {layer} sends {told} beside the hidden states, the step began with {self._announced}"
            )
        for tensor in (x, *extras):
            if tensor is not None:
                connector.send(tensor, layer)

    def recv(self, out: torch.Tensor, layer: int) -> None:
        self._connected().recv(out, layer)

    def _connected(self) -> Connector:
        if self._connector is None:
            connector = make_connector(self._config)
            connector.connect(self._facts)
            logger.info("afd: connected to the FFN role")
            self._connector = connector
        return self._connector


@dataclass(frozen=True)
class Prepared:
    """What a role knows about itself once its model is built."""

    config: AFDConfig
    facts: Facts


_prepared: Prepared | None = None
_current: Link | None = None


def prepare(vllm_config: Any, wrapper: type, layers: tuple[int, ...]) -> None:
    """Called by a role's model when it is built. Connects nothing."""
    global _prepared
    config = parse_config(vllm_config.additional_config["afd"])
    _prepared = Prepared(config, facts_of(vllm_config, config, wrapper, layers))
    install(AttentionLink(config, _prepared.facts) if config.role == "attention" else Loopback())


def prepared() -> Prepared:
    if _prepared is None:
        raise WireError("no model of an AFD role was built in this process")
    return _prepared


def install(link: Link) -> None:
    """Make a link the one that this process's operators use."""
    global _current
    _current = link


def current() -> Link:
    if _current is None:
        raise WireError("a connector node ran in a process without an AFD role")
    return _current
