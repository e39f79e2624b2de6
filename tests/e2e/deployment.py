"""One model served twice, unsplit and split into two roles: what the tests of equality talk to."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from demo.servers import Server, afd_flags, free_port, has_cpu_mla, serve, wait_logged, wait_ready

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
EAGER_AT_ONCE = Mode("eager-at-once", ("--enforce-eager",), first=None)
FLOAT32_MLA = ("--attention-backend", "CPU_MLA") if has_cpu_mla() else ()
"""A CPU with AMX would choose a backend that wants bf16."""
COMPILED_FLOAT32 = Mode("compiled-float32", ("--dtype", "float32", *FLOAT32_MLA), first="attention")
COMPILED = Mode("compiled", (), first=None)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The running servers."""

    mode: Mode
    unsplit: Server
    attention: Server
    ffn: Server

    def check(self) -> None:
        """Raise ServerFailed, with the tail of its log, for a server that has ended."""
        for server in (self.unsplit, self.attention, self.ffn):
            server.is_ready()


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def deploy(checkpoint: Path, mode: Mode, logs: Path) -> Iterator[Deployment]:
    """Start the three servers and wait until they answer; stop them on leaving."""
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
