"""The gloo connector between two processes, as the two roles use it. No vLLM."""

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from afd_runtime.config import AFDConfig, parse_config
from afd_runtime.connectors import make_connector
from afd_runtime.connectors.base import Connector
from afd_runtime.errors import AFDConfigError, HandshakeError, WireError
from afd_runtime.header import Header, parse_header

FACTS = {"dtype": "torch.float32", "split layers": [0, 1]}
LAYERS = (0, 1)
HIDDEN = 8
DEADLINE_S = 30.0


def config_of(role: str, port: int, connect_timeout_s: float = DEADLINE_S, timeout_s: float = DEADLINE_S) -> AFDConfig:
    waits = {"timeout_s": timeout_s, "connect_timeout_s": connect_timeout_s}
    return parse_config({"role": role, "port": port, "connector_extra_config": waits})


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
        return number


def exchange(connector: Connector, sequence: int, tokens: int) -> torch.Tensor:
    """One step as the attention role makes it; every layer of the peer adds 1."""
    connector.send_header(Header(sequence, tokens).to_tensor())
    x = torch.full((tokens, HIDDEN), float(sequence))
    for layer in LAYERS:
        connector.send(x, layer)
        x = torch.empty(tokens, HIDDEN)
        connector.recv(x, layer)
    return x


def attention_process(pipe: Connection, port: int, facts: dict[str, Any]) -> None:
    """Connect, then make a step for each number of tokens the test asks for, until it asks for 0."""
    connector = make_connector(config_of("attention", port))
    try:
        connector.connect(facts)
        pipe.send("connected")
        for sequence, tokens in enumerate(iter(pipe.recv, 0)):
            pipe.send(exchange(connector, sequence, tokens).tolist())
    except (HandshakeError, WireError) as error:
        pipe.send(f"{type(error).__name__}: {error}")


def ffn_process(pipe: Connection, port: int) -> None:
    connector = make_connector(config_of("ffn", port))
    connector.listen()
    connector.connect(FACTS)
    pipe.send("connected")
    pipe.recv()


class Peer:
    """The other role, in a process of its own."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()

    def hears(self) -> Any:
        assert self.pipe.poll(DEADLINE_S), "the other process said nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def ending(*peers: Peer) -> Iterator[None]:
    try:
        yield
    finally:
        for peer in peers:
            peer.kill()


def serve_step(connector: Connector, sequence: int) -> None:
    header = parse_header(connector.recv_header(), sequence, max_tokens=64)
    for layer in LAYERS:
        x = torch.empty(header.tokens, HIDDEN)
        connector.recv(x, layer)
        connector.send(x + 1, layer)


def test_steps_of_different_sizes_then_a_new_attention_after_the_first_died(port: int) -> None:
    ffn = make_connector(config_of("ffn", port))
    ffn.listen()
    for _ in range(2):
        peer = Peer(attention_process, port, FACTS)
        with ending(peer):
            assert ffn.connect(FACTS)
            assert peer.hears() == "connected"
            for sequence, tokens in enumerate((3, 1)):
                peer.pipe.send(tokens)
                serve_step(ffn, sequence)
                assert peer.hears() == [[sequence + 2.0] * HIDDEN] * tokens
            peer.kill()
            start = time.monotonic()
            with pytest.raises(WireError, match=r"^lost the attention role: Connection closed by peer \[127"):
                ffn.recv_header()
            assert time.monotonic() - start < 5
            ffn.close()


def test_attention_may_start_first_and_notices_the_death_of_the_ffn(port: int) -> None:
    connector = make_connector(config_of("attention", port))
    failures: list[Exception] = []
    started = threading.Event()

    def join() -> None:
        started.set()
        try:
            connector.connect(FACTS)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    started.wait()
    ffn = Peer(ffn_process, port)
    with ending(ffn):
        assert ffn.hears() == "connected"
        thread.join(DEADLINE_S)
        assert failures == []
        ffn.kill()
        start = time.monotonic()
        with pytest.raises(WireError, match=r"^lost the FFN role: "):
            exchange(connector, 0, 3)
        assert time.monotonic() - start < 5


def test_an_ffn_that_is_alive_but_silent(port: int) -> None:
    ffn = Peer(ffn_process, port)
    connector = make_connector(config_of("attention", port, timeout_s=1))
    with ending(ffn):
        connector.connect(FACTS)
        with pytest.raises(WireError) as error:
            exchange(connector, 0, 3)
    assert str(error.value) == "lost the FFN role: Timed out waiting 1000ms for send operation to complete"


def test_both_sides_refuse_and_the_ffn_waits_for_another(port: int) -> None:
    text = (
        "the attention and the ffn role do not fit together:\n"
        "  dtype: attention has torch.float16, ffn has torch.float32"
    )
    ffn = make_connector(config_of("ffn", port))
    ffn.listen()
    wrong = Peer(attention_process, port, {**FACTS, "dtype": "torch.float16"})
    with ending(wrong):
        with pytest.raises(HandshakeError) as error:
            ffn.connect(FACTS)
        assert str(error.value) == text
        assert wrong.hears() == f"HandshakeError: {text}"
    right = Peer(attention_process, port, FACTS)
    with ending(right):
        assert ffn.connect(FACTS)
        assert right.hears() == "connected"
    ffn.close()


def test_a_busy_ffn_and_an_attention_that_gave_up(port: int) -> None:
    ffn = make_connector(config_of("ffn", port))
    ffn.listen()
    with pytest.raises(WireError) as error:
        make_connector(config_of("attention", port, connect_timeout_s=0.5)).connect(FACTS)
    assert str(error.value) == (
        f"the FFN role at 127.0.0.1:{port} did not answer in time; is it serving another attention role?"
    )
    peer = Peer(attention_process, port, FACTS)
    with ending(peer):
        assert ffn.connect(FACTS)
        assert peer.hears() == "connected"
    ffn.close()


def test_no_ffn_at_all(port: int) -> None:
    with pytest.raises(WireError) as error:
        make_connector(config_of("attention", port, connect_timeout_s=0.3)).connect(FACTS)
    assert str(error.value) == (
        f"no FFN role at 127.0.0.1:{port} within 0.3 s ([Errno 111] Connection refused); start it first"
    )


def test_an_ffn_that_is_told_to_stop_waits_no_longer(port: int) -> None:
    ffn = make_connector(config_of("ffn", port))
    ffn.listen()
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    assert not ffn.connect(FACTS, stop)
    ffn.close()
    ffn.close()
    with pytest.raises(WireError) as error:
        ffn.recv_header()
    assert str(error.value) == "the session is closed"


def test_a_taken_port(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(AFDConfigError) as error:
        make_connector(config_of("ffn", port)).listen()
    assert str(error.value) == (
        f"afd.host, afd.port: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "give an address of this machine and a free port"
    )


def test_the_ffn_listens_on_its_address_only(port: int) -> None:
    ffn = make_connector(config_of("ffn", port))
    ffn.listen()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=2)
