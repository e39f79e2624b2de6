"""The connector nodes under `torch.compile`, with a link within the process."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from afd_runtime import link, ops
from afd_runtime.errors import WireError
from afd_runtime.header import DTYPES, Extra

LAYERS = (1, 4)


class Recorder:
    """A peer that answers each hop with twice what it was sent."""

    def __init__(self) -> None:
        self.hops: list[tuple[str, int, bool]] = []
        self.held = torch.empty(0)
        self.extras: list[torch.Tensor | None] = []

    def send(self, x: torch.Tensor, extras: Sequence[torch.Tensor | None], layer: int, opens_step: bool) -> None:
        self.hops.append(("send", layer, opens_step))
        self.held = x.clone()
        self.extras = [extra if extra is None else extra.clone() for extra in extras]

    def recv(self, out: torch.Tensor, layer: int) -> None:
        self.hops.append(("recv", layer, False))
        out.copy_(self.held * 2)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    peer = Recorder()
    monkeypatch.setattr(link, "_current", peer)
    yield peer
    torch._dynamo.reset()


def attention(x: torch.Tensor) -> torch.Tensor:
    for layer in LAYERS:
        ticket = ops.send(x + 1, layer, layer == LAYERS[0])
        x = ops.recv(ticket, x.shape[0], x.shape[1], x.dtype, layer) - 1
    return x


def ffn(tokens_like: torch.Tensor) -> torch.Tensor:
    ticket = tokens_like.new_empty(0)
    for layer in LAYERS:
        x = ops.recv(ticket, tokens_like.shape[0], 8, torch.bfloat16, layer)
        ticket = ops.send(x * 3, layer)
    return ticket


def hops(*kinds: str) -> list[tuple[str, int, bool]]:
    opens = {("send", LAYERS[0])} if kinds[0] == "send" else set()
    return [(kind, layer, (kind, layer) in opens) for layer in LAYERS for kind in kinds]


def compiled(function: Callable[[torch.Tensor], torch.Tensor], backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if backend == "none":
        return function
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


@pytest.mark.parametrize("backend", ["none", "aot_eager", "inductor"])
def test_attention_exchanges_layer_by_layer(recorder: Recorder, backend: str) -> None:
    step = compiled(attention, backend)
    for tokens in (3, 5):
        recorder.hops.clear()
        x = torch.randn(tokens, 8)
        assert torch.equal(step(x), ((x + 1) * 2 - 1 + 1) * 2 - 1)
        assert recorder.hops == hops("send", "recv")


@pytest.mark.parametrize("backend", ["none", "aot_eager", "inductor"])
def test_ffn_keeps_every_hop_though_nothing_uses_the_last_ticket(recorder: Recorder, backend: str) -> None:
    step = compiled(ffn, backend)
    for tokens in (3, 5):
        recorder.hops.clear()
        recorder.held = torch.ones(tokens, 8)
        assert step(torch.zeros(tokens, dtype=torch.int8)).shape == (0,)
        assert recorder.hops == hops("recv", "send")
        assert torch.equal(recorder.held, torch.full((tokens, 8), 36.0, dtype=torch.bfloat16))


def test_operators_pass_torchs_own_checks(recorder: Recorder) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    sent = (torch.randn(3, 8), [None, torch.arange(3)], 1, True)
    torch.library.opcheck(torch.ops.afd.send.default, sent, test_utils=checks)
    recorder.held = torch.ones(3, 8)
    arguments = (torch.empty(0), 3, 8, torch.float32, 1)
    torch.library.opcheck(torch.ops.afd.recv.default, arguments, test_utils=checks)
    several = (torch.empty(0), 3, [8, 8], [DTYPES.index(torch.float32)] * 2, 1)
    torch.library.opcheck(torch.ops.afd.recv_all.default, several, test_utils=checks)


def test_a_strided_tensor_is_sent_whole(recorder: Recorder) -> None:
    x = torch.arange(24.0).reshape(8, 3).t()
    ops.send(x, 1)
    assert recorder.held.is_contiguous()
    assert torch.equal(recorder.held, x)


@pytest.mark.parametrize("backend", ["none", "aot_eager", "inductor"])
def test_all_values_cross_though_the_layer_uses_one(recorder: Recorder, backend: str) -> None:
    def step(tokens_like: torch.Tensor) -> torch.Tensor:
        values = (Extra(torch.float32, 8), Extra(torch.float32, 8))
        x, _ = ops.recv_all(tokens_like.new_empty(0), tokens_like.shape[0], values, 1)
        return ops.send(x, 1, False, (None, tokens_like))

    recorder.held = torch.ones(3, 8)
    compiled(step, backend)(torch.zeros(3, dtype=torch.int8))
    assert recorder.hops == [("recv", 1, False), ("recv", 1, False), ("send", 1, False)]
    assert recorder.extras[0] is None
    assert recorder.extras[1] is not None
    assert recorder.extras[1].shape == (3,)


def test_only_tensors_cross(recorder: Recorder) -> None:
    with pytest.raises(WireError) as error:
        ops.send(torch.ones(2, 4), 1, False, [("a", "tuple")])  # type: ignore[list-item]
    assert str(error.value) == "a tuple cannot cross to the FFN role, only tensors can"


def test_a_node_without_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_current", None)
    with pytest.raises(WireError) as error:
        ops.send(torch.ones(1, 1), 0)
    assert str(error.value) == "a connector node ran in a process without an AFD role"


def test_loopback_answers_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_current", link.Loopback())
    assert torch.equal(attention(torch.ones(2, 8)), torch.full((2, 8), -1.0))
