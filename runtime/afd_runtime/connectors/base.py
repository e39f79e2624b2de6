"""What a connector must do: rendezvous, then tensors."""

import threading
from abc import ABC, abstractmethod

import torch

from afd_runtime.config import AFDConfig
from afd_runtime.handshake import Facts


class Connector(ABC):
    """Moves the hops of one process. Every method but `close` raises `WireError` when the peer is gone or too slow."""

    def __init__(self, config: AFDConfig) -> None:
        self.config = config

    @abstractmethod
    def listen(self) -> None:
        """FFN role, once: make this process reachable. Raise `AFDConfigError` if the address cannot be used."""

    @abstractmethod
    def connect(self, facts: Facts, stop: threading.Event | None = None) -> bool:
        """Start a session with a peer whose facts equal these; raise `HandshakeError` if they do not.

        Attention waits for the FFN as long as `connect_timeout_s`. The FFN waits for the next Attention until `stop` is
        set, and then returns False.
        """

    @abstractmethod
    def send_header(self, header: torch.Tensor) -> None:
        """int64 [SIZE] from Attention to the FFN."""

    @abstractmethod
    def recv_header(self) -> torch.Tensor:
        """int64 [SIZE]; waits as long as the peer lives."""

    @abstractmethod
    def send(self, x: torch.Tensor, layer: int) -> None:
        """Contiguous [tokens, hidden]; may be overwritten when this returns."""

    @abstractmethod
    def recv(self, out: torch.Tensor, layer: int) -> None:
        """Into contiguous [tokens, hidden], within `timeout_s`."""

    @abstractmethod
    def close(self) -> None:
        """End the session, so that the peer notices at once. Safe to call twice and from another thread."""
