"""Start, watch and stop `vllm serve` processes on the CPU; one process group each, nothing left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil

HOST = "127.0.0.1"
STOP_SECONDS = 15.0
CPU_MLA = Path("v1/attention/backends/mla/cpu_mla.py")
"""Where vLLM keeps its MLA for the CPU, in releases that have it; in others the same layers run without MLA."""


def has_cpu_mla() -> bool:
    """Whether the installed vLLM serves MLA on the CPU; found without importing vLLM."""
    found = find_spec("vllm")
    return found is not None and any(
        (Path(folder) / CPU_MLA).is_file() for folder in found.submodule_search_locations or ()
    )


ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    **({} if has_cpu_mla() else {"VLLM_MLA_DISABLE": "1"}),
}
"""Environment of every server: one thread each on shared cores, no network, and the endpoints /pause and /resume."""
FLAGS = (
    *("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"),
    *("--kv-cache-memory-bytes", str(64 * 2**20), "--num-gpu-blocks-override", "64"),
)
"""Flags of every server: no more than a small checkpoint needs, so that memory shows its weights. The KV cache has
both its sizes: a release that does not read the bytes on the CPU would take half of the machine's memory."""

Say = Callable[[str], None]


class ServerFailed(RuntimeError):
    """A server ended or did not become ready in time; the text ends with the tail of its log."""


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Server:
    """A started `vllm serve`: ready once `wait_ready` has returned."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def is_ready(self) -> bool:
        """Whether /health answers. Raises ServerFailed if the process has ended."""
        if (status := self.process.poll()) is not None:
            raise ServerFailed(f"server {self.name} ended with status {status}\n{self.tail()}")
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=2).status_code == httpx.codes.OK
        return False

    def tail(self, lines: int = 30) -> str:
        """What to read first of a failure: the log's path, the first errors in it, and its last lines."""
        log = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in log if re.search(r"(Error|Exception): ", line)]
        return "\n".join([f"{self.log}:", *errors[:3], "...", *log[-lines:]])

    def owned_parameters(self) -> int:
        """Parameters this process holds, as the runtime logged it. Raises ServerFailed if it did not."""
        if found := re.search(r"afd: role \w+ owns (\d+) parameters", self.log.read_text(errors="replace")):
            return int(found[1])
        raise ServerFailed(f"server {self.name} did not say what it owns\n{self.tail()}")

    def pss_bytes(self) -> int:
        """Resident memory of the server's processes, pages shared between processes counted once."""
        total = 0
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def family(self) -> list[psutil.Process]:
        """The server's process and all its descendants, as far as they are alive."""
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.process.pid)
            return [leader, *leader.children(recursive=True)]
        return []

    def stop(self) -> None:
        """End the process group: SIGTERM, and SIGKILL for what is left after `STOP_SECONDS`."""
        family = self.family()
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.signal(signal.SIGKILL)
        self.process.wait()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def afd_flags(role: str, port: int, **settings: object) -> tuple[str, ...]:
    """The one flag that makes a server one half of a split: its role, and where the two halves meet."""
    afd = {
        "role": role,
        "connector": "GlooAFDConnector",
        "host": HOST,
        "port": port,
        "num_attention_ranks": 1,
        "num_ffn_ranks": 1,
        **settings,
    }
    return ("--additional-config", json.dumps({"afd": afd}))


@contextmanager
def serve(
    name: str, checkpoint: Path, logs: Path, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start `vllm serve checkpoint` with `flags`, and stop it on leaving. Returns at once: see `wait_ready`."""
    port = free_port()
    log = logs / f"{name}.log"
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(checkpoint), "--served-model-name", "model"]
    command += ["--host", HOST, "--port", str(port), *FLAGS, *flags]
    logs.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
            start_new_session=True,
        )
    server = Server(name, process, port, log)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def split(checkpoint: Path, logs: Path, flags: Sequence[str] = (), first: str = "ffn") -> Iterator[dict[str, Server]]:
    """Start both halves of a split, `first` first, with the same `flags`; yield them by role."""
    port = free_port()
    order = (first, "attention" if first == "ffn" else "ffn")
    with ExitStack() as stack:
        yield {
            role: stack.enter_context(serve(role, checkpoint, logs, (*flags, *afd_flags(role, port)))) for role in order
        }


def wait_ready(servers: Sequence[Server], seconds: float, say: Say) -> float:
    """Wait until every server answers, telling `say` every 10 s how far they are; return the seconds it took.

    Raises ServerFailed if one ends, or is not ready after `seconds`.
    """
    start = time.monotonic()
    said = 0.0
    while True:
        states = {server: server.is_ready() for server in servers}
        passed = time.monotonic() - start
        if all(states.values()):
            return passed
        if passed > seconds:
            late = [server for server, ready in states.items() if not ready]
            tails = "\n".join(server.tail() for server in late)
            raise ServerFailed(f"not ready after {seconds:.0f} s: {', '.join(s.name for s in late)}\n{tails}")
        if passed - said >= 10:
            said = passed
            say("  ".join(f"{server.name}: {'ready' if ready else 'starting'}" for server, ready in states.items()))
        time.sleep(0.5)


def wait_logged(server: Server, text: str, seconds: float) -> None:
    """Wait until `text` stands in the server's log. Raises ServerFailed if it ends, or says no such thing in time."""
    deadline = time.monotonic() + seconds
    while text not in server.log.read_text(errors="replace"):
        server.is_ready()
        if time.monotonic() > deadline:
            raise ServerFailed(f"server {server.name} did not say {text!r} in {seconds:.0f} s\n{server.tail()}")
        time.sleep(0.5)
