"""`GlooAFDConnector`: hops through host memory over TCP, for the CPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from afd_runtime.config import AFDConfig
from afd_runtime.connectors.base import Connector
from afd_runtime.connectors.rendezvous import Rendezvous, dist
from afd_runtime.errors import WireError
from afd_runtime.handshake import Facts
from afd_runtime.header import SIZE
from afd_runtime.topology import topology_of

HEADER_TAG = 0
IDLE = timedelta(days=3650)
"""For the hop that waits for the next step: a peer may be silent as long as it likes, its death closes the socket."""


class GlooConnector(Connector):
    """One process group per session, beside vLLM's own groups. The tag of a hop is its layer."""

    def __init__(self, config: AFDConfig) -> None:
        super().__init__(config)
        self._rendezvous = Rendezvous(config)
        self._group: Any = None
        self._timeout = timedelta(seconds=config.connector_extra_config.timeout_s)
        topology = topology_of(config)
        # One process of each role: the ranks of the two ends are all the ranks there are.
        self._rank = topology.rank(config.role, 0)
        self._peer = topology.rank("attention" if config.role == "ffn" else "ffn", 0)
        self._size = topology.size

    def listen(self) -> None:
        self._rendezvous.host()

    def connect(self, facts: Facts, stop: threading.Event | None = None) -> bool:
        if self.config.role == "attention":
            store = self._rendezvous.join(facts)
        else:
            store = self._rendezvous.accept(facts, stop or threading.Event())
        if store is None:
            return False
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._rendezvous.local_address())]
        with self._lost_peer():
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        return True

    def send_header(self, header: torch.Tensor) -> None:
        with self._lost_peer():
            self._open().send([header], self._peer, HEADER_TAG).wait()

    def recv_header(self) -> torch.Tensor:
        header = torch.empty(SIZE, dtype=torch.int64)
        with self._lost_peer():
            self._open().recv([header], self._peer, HEADER_TAG).wait(IDLE)
        return header

    def send(self, x: torch.Tensor, layer: int) -> None:
        with self._lost_peer():
            self._open().send([x], self._peer, 1 + layer).wait()

    def recv(self, out: torch.Tensor, layer: int) -> None:
        with self._lost_peer():
            self._open().recv([out], self._peer, 1 + layer).wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _open(self) -> Any:
        if self._group is None:
            raise WireError("the session is closed")
        return self._group

    @contextmanager
    def _lost_peer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, WireError):
                raise
            other = "FFN" if self.config.role == "attention" else "attention"
            raise WireError(f"lost the {other} role: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    """The first sentence of a gloo error, without the source position before it."""
    return str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
