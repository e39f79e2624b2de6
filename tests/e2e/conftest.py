"""Servers that the end-to-end tests share: starting one takes a minute of processor time, so there are few."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from demo.checkpoint import Size, count_parameters, write_checkpoint
from demo.servers import Server, afd_flags, free_port, serve, wait_logged, wait_ready

START_SECONDS = 240.0
WAITS = {"attention": "afd: waiting for the FFN role", "ffn": "afd: the FFN role waits for the attention role"}
"""What a role logs once it is up and its peer is not there."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How the servers of a deployment run, and which role is up and waiting before the other is started."""

    name: str
    flags: tuple[str, ...]
    first: Literal["attention", "ffn"] | None


EAGER = Mode("eager", ("--enforce-eager",), first="ffn")
COMPILED_FLOAT32 = Mode("compiled-float32", ("--dtype", "float32", "--attention-backend", "CPU_MLA"), first="attention")
COMPILED = Mode("compiled", (), first=None)


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


@pytest.fixture(scope="session", params=[EAGER, COMPILED_FLOAT32], ids=lambda mode: mode.name)
def deployment(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Both ways of serving the checkpoint, in the two modes in which they must be equal to the last bit."""
    mode: Mode = request.param
    logs = tmp_path_factory.mktemp(f"logs-{mode.name}")
    port = free_port()
    with ExitStack() as stack:

        def start(name: str, *flags: str) -> Server:
            return stack.enter_context(serve(name, checkpoint, logs, (*mode.flags, *flags)))

        started = {"unsplit": start("unsplit")}
        for role in ("attention", "ffn") if mode.first == "attention" else ("ffn", "attention"):
            started[role] = start(role, *afd_flags(role, port))
            if role == mode.first:
                wait_logged(started[role], WAITS[role], START_SECONDS)
        wait_ready(list(started.values()), START_SECONDS, say)
        yield Deployment(mode, **started)


@pytest.fixture(scope="session")
def checkpoint_parameters(checkpoint: Path) -> int:
    return count_parameters(checkpoint)
