"""Where the roles find each other: a TCP store that the FFN role hosts at `host:port`.

Each Attention process that comes opens a session: it takes the next number, puts its facts under that number, and waits
for the FFN's. A number is used once, so that what a dead Attention left behind confuses nobody.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed

from afd_runtime.config import AFDConfig
from afd_runtime.errors import AFDConfigError, WireError
from afd_runtime.handshake import Facts, check_facts
from afd_runtime.log import init_logger

logger = init_logger(__name__)

POLL_S = 0.1
dist: Any = torch.distributed
"""Its stubs lack most of what is used here."""
NUMBER = "afd/sessions"


class Rendezvous:
    """Holds the store. `host` opens it for the FFN role, `join` for the attention role."""

    def __init__(self, config: AFDConfig) -> None:
        self._config = config
        self._store: Any = None
        self._last = 0

    def host(self) -> None:
        """Listen on the given address only."""
        host, port = self._config.host, self._config.port
        try:
            listener = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            raise AFDConfigError(
                f"afd.host, afd.port: cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); "
                "give an address of this machine and a free port"
            ) from None
        # The store owns the descriptor from here on.
        self._store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )  # fmt: skip

    def accept(self, facts: Facts, stop: threading.Event) -> Any | None:
        """FFN role: wait for the next Attention and check its facts; None when `stop` was set meanwhile."""
        store = self._store
        while not stop.is_set():
            newest = store.add(NUMBER, 0)
            for session in range(newest, self._last, -1):
                if store.check([_key(session, "attention")]):
                    self._last = newest
                    store.set(_key(session, "ffn"), json.dumps(facts))
                    check_facts(facts, json.loads(store.get(_key(session, "attention"))), "ffn")
                    return dist.PrefixStore(_key(session, "group"), store)
            stop.wait(POLL_S)
        return None

    def join(self, facts: Facts) -> Any:
        """Attention role: open a session with the FFN and check its facts."""
        deadline = time.monotonic() + self._config.connector_extra_config.connect_timeout_s
        address = f"{self._config.host}:{self._config.port}"
        logger.info("afd: waiting for the FFN role at %s", address)
        self._wait_until_listening(deadline, address)
        store = self._store = dist.TCPStore(self._config.host, self._config.port, is_master=False)
        session = store.add(NUMBER, 1)
        store.set(_key(session, "attention"), json.dumps(facts))
        try:
            store.wait([_key(session, "ffn")], timedelta(seconds=max(1.0, deadline - time.monotonic())))
        except RuntimeError:
            with suppress(RuntimeError):
                store.delete_key(_key(session, "attention"))
            raise WireError(
                f"the FFN role at {address} did not answer in time; is it serving another attention role?"
            ) from None
        check_facts(facts, json.loads(store.get(_key(session, "ffn"))), "attention")
        return dist.PrefixStore(_key(session, "group"), store)

    def local_address(self) -> str:
        """This machine's address on the way to the FFN role; sends nothing."""
        with socket.socket(_family(self._config.host), socket.SOCK_DGRAM) as probe:
            probe.connect((self._config.host, self._config.port))
            return str(probe.getsockname()[0])

    def _wait_until_listening(self, deadline: float, address: str) -> None:
        while True:
            try:
                socket.create_connection((self._config.host, self._config.port), timeout=1).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    waited = self._config.connector_extra_config.connect_timeout_s
                    raise WireError(f"no FFN role at {address} within {waited:g} s ({error}); start it first") from None
            time.sleep(POLL_S)


def _key(session: int, name: str) -> str:
    return f"afd/session/{session}/{name}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
