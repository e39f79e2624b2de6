"""Servers that the end-to-end tests share: starting one takes a minute of processor time, so there are few."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.checkpoint import Size, count_parameters, write_checkpoint
from demo.servers import Server, afd_flags, free_port, serve, wait_logged, wait_ready

START_SECONDS = 240.0
WAITS_FOR_PEER = "waiting for the FFN"


@dataclass(frozen=True, slots=True)
class Mode:
    """How the servers of a deployment run, and which role is started first."""

    name: str
    flags: tuple[str, ...]
    first: str
    logprob_bound: float
    """Largest difference between a log-probability of the split and of the unsplit server."""


EAGER = Mode("eager", ("--enforce-eager",), first="ffn", logprob_bound=0.0)
COMPILED = Mode("compiled", (), first="attention", logprob_bound=0.0)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model served twice: unsplit, and split into two roles."""

    mode: Mode
    unsplit: Server
    attention: Server
    ffn: Server


def say(text: str) -> None:
    print(text, flush=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), Size())


@pytest.fixture(scope="session", params=[EAGER, COMPILED], ids=lambda mode: mode.name)
def deployment(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Both ways of serving the checkpoint. The role that comes first waits, all started up, for the other to exist."""
    mode: Mode = request.param
    logs = tmp_path_factory.mktemp(f"logs-{mode.name}")
    port = free_port()
    with ExitStack() as stack:

        def start(name: str, *flags: str) -> Server:
            return stack.enter_context(serve(name, checkpoint, logs, (*mode.flags, *flags)))

        unsplit = start("unsplit")
        if mode.first == "ffn":
            ffn = start("ffn", *afd_flags("ffn", port))
            wait_ready([unsplit, ffn], START_SECONDS, say)
            attention = start("attention", *afd_flags("attention", port))
        else:
            attention = start("attention", *afd_flags("attention", port))
            wait_logged(attention, WAITS_FOR_PEER, START_SECONDS)
            ffn = start("ffn", *afd_flags("ffn", port))
        wait_ready([unsplit, attention, ffn], START_SECONDS, say)
        yield Deployment(mode, unsplit, attention, ffn)


@pytest.fixture(scope="session")
def checkpoint_parameters(checkpoint: Path) -> int:
    return count_parameters(checkpoint)
