"""The FFN role's loop around a real step, with the attention role played by this process. Imports vLLM."""

import logging
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from vllm.config import CompilationConfig, CompilationMode, VllmConfig

from afd_runtime import link
from afd_runtime.config import AFDConfig, parse_config
from afd_runtime.connectors import make_connector
from afd_runtime.connectors.base import Connector
from afd_runtime.errors import AFDConfigError, HandshakeError, WireError
from afd_runtime.ffn_loop import FFNLoop
from afd_runtime.header import Extra, Header, describe
from afd_runtime.split import FFNLayer

FACTS = {"dtype": "torch.float32"}
HIDDEN = 8
POISON = -1.0


class Layer(FFNLayer, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


class HashedLayer(Layer):
    extras = ("input_ids",)

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        return -x if input_ids is None else x + input_ids[:, None]


class FailingLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == POISON).any():
            raise ArithmeticError("poison")
        return x * 2 + 1


class Model(nn.Module):
    afd_hidden_size = HIDDEN
    afd_dtype = torch.float32

    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.afd_extras = layer.extras

    def usual_extras(self) -> tuple[Extra | None, ...]:
        return tuple(Extra(torch.int32, 0) for _ in self.afd_extras)


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
        return number


def config_of(role: str, port: int) -> AFDConfig:
    waits = {"timeout_s": 20, "connect_timeout_s": 20}
    return parse_config({"role": role, "port": port, "connector_extra_config": waits})


Start = Callable[..., FFNLoop]


@pytest.fixture
def start(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    loops: list[FFNLoop] = []

    def make(layer: type[Layer] = Layer, mode: CompilationMode = CompilationMode.NONE) -> FFNLoop:
        monkeypatch.setattr(link, "_prepared", link.Prepared(config_of("ffn", port), FACTS))
        monkeypatch.setattr(link, "_current", None)
        vllm_config = VllmConfig(compilation_config=CompilationConfig(mode=mode, backend="eager"))
        loop = FFNLoop(vllm_config, Model(layer), torch.device("cpu"))  # type: ignore[arg-type]
        loop.start()
        loops.append(loop)
        return loop

    yield make
    for loop in loops:
        loop.stop()
        assert not loop._thread.is_alive()


def join(port: int, facts: dict[str, str] = FACTS) -> Connector:
    connector = make_connector(config_of("attention", port))
    connector.connect(facts)
    return connector


def exchange(connector: Connector, sequence: int, x: torch.Tensor, *extras: torch.Tensor | None) -> torch.Tensor:
    told = tuple(describe(extra, x.shape[0]) for extra in extras)
    connector.send_header(Header(sequence, x.shape[0], told).to_tensor())
    for layer in range(2):
        for value in (x, *extras):
            if value is not None:
                connector.send(value, layer)
        x = torch.empty_like(x)
        connector.recv(x, layer)
    return x


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE])
def test_steps_of_any_size_and_one_attention_after_another(start: Start, port: int, mode: CompilationMode) -> None:
    start(mode=mode)
    for _ in range(2):
        connector = join(port)
        for sequence, tokens in enumerate((5, 1, 7)):
            x = torch.randn(tokens, HIDDEN)
            assert torch.equal(exchange(connector, sequence, x), (x * 2 + 1) * 2 + 1)
        connector.close()


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE])
def test_what_goes_with_the_hidden_states_can_differ_from_step_to_step(
    start: Start, port: int, mode: CompilationMode
) -> None:
    start(HashedLayer, mode)
    connector = join(port)
    x, ids = torch.randn(3, HIDDEN), torch.arange(3)
    for sequence, dtype in enumerate((torch.int32, torch.int64, torch.int32)):
        assert torch.equal(exchange(connector, 2 * sequence, x, ids.to(dtype)), x + ids[:, None] + ids[:, None])
        assert torch.equal(exchange(connector, 2 * sequence + 1, x, None), x)
    connector.close()


def test_a_step_that_fails_closes_the_session_and_the_next_one_works(start: Start, port: int) -> None:
    start(FailingLayer)
    connector = join(port)
    begin = time.monotonic()
    with pytest.raises(WireError, match=r"^lost the FFN role: "):
        exchange(connector, 0, torch.full((3, HIDDEN), POISON))
    assert time.monotonic() - begin < 5
    connector.close()
    assert torch.equal(exchange(join(port), 0, torch.zeros(3, HIDDEN)), torch.full((3, HIDDEN), 3.0))


def test_a_wrong_header_closes_the_session(
    start: Start, port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    start()
    connector = join(port)
    with caplog.at_level(logging.INFO, logger="vllm"), pytest.raises(WireError, match=r"^lost the FFN role: "):
        exchange(connector, 3, torch.zeros(3, HIDDEN))
    text = "afd: session over: step header: sequence number 3, expected 0; a step was lost"
    assert text in [record.getMessage() for record in caplog.records]


def test_a_refused_attention_leaves_the_loop_waiting(start: Start, port: int) -> None:
    start()
    with pytest.raises(HandshakeError):
        join(port, {"dtype": "torch.float16"})
    assert exchange(join(port), 0, torch.zeros(1, HIDDEN)).shape == (1, HIDDEN)


def test_an_address_in_use_is_raised_by_start(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(AFDConfigError, match="cannot listen on"):
        start()


def test_a_failing_warm_up_is_raised_by_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("cold")

    monkeypatch.setattr(Layer, "forward", fail)
    with pytest.raises(ArithmeticError, match="cold"):
        start()
