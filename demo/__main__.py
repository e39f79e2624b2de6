"""Compile DeepSeek-V2 for the installed vLLM, serve it split and unsplit, and compare what the two answer.

`python -m demo`: exit status 0 if equal, 1 if different or failed. Files and logs are kept in `.demo/`.
"""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from demo.checkpoint import Size, count_parameters, prompt_of, write_checkpoint
from demo.client import Answer, Difference, Request, complete, complete_together, difference
from demo.servers import Server, ServerFailed, serve, split, wait_ready

FOLDER = Path(".demo")
LOGS = FOLDER / "logs"
SPEC = "deepseek_v2"
SIZE = Size(hidden=512, dense_intermediate=2048, experts=64, expert_intermediate=1024)
"""About 320 million parameters, most of them experts, so that memory shows who holds what."""
EAGER = ("--enforce-eager",)
"""Without inductor, the unsplit server runs the same kernels as the split: answers must be equal to the last bit."""
START_SECONDS = 300.0

ALONE = (Request((prompt_of(6),)), Request((prompt_of(9, start=1),)), Request((prompt_of(150, start=2),)))
"""Sent one after another; the last prompt is longer than one block of the KV cache."""
TOGETHER = (Request((prompt_of(5, start=3),)), Request((prompt_of(7, start=4),)), Request((prompt_of(8, start=5),)))
"""Sent at the same time."""

console = Console(highlight=False)
began = time.monotonic()


@dataclass(frozen=True, slots=True)
class Compared:
    """One request with what both deployments answered."""

    request: Request
    unsplit: Answer
    split: Answer
    difference: Difference


def say(text: str, style: str = "dim") -> None:
    console.print(f"[{style}]{time.monotonic() - began:4.0f} s  {text}[/]")


def compile_wrappers() -> None:
    """Run `afd-compile` as a person would. Raises CalledProcessError where it refuses; it has then said why."""
    command = [str(Path(sys.executable).with_name("afd-compile")), SPEC, "--vllm", "installed"]
    subprocess.run(command, check=True)


def answers_of(url: str) -> list[Answer]:
    """The answers to all requests of the demo, always asked in the same order."""
    return [*(complete(url, request) for request in ALONE), *complete_together(url, TOGETHER)]


def compare(unsplit: Server, attention: Server) -> list[Compared]:
    """Ask both deployments the same."""
    say(f"sending {len(ALONE)} requests one by one and {len(TOGETHER)} together to the unsplit server")
    whole = answers_of(unsplit.url)
    say("sending the same to the attention server")
    halves = answers_of(attention.url)
    requests = (*ALONE, *TOGETHER)
    return [
        Compared(request, one, other, difference(one, other))
        for request, one, other in zip(requests, whole, halves, strict=True)
    ]


def answers_table(compared: list[Compared]) -> Table:
    table = Table(
        "prompt",
        "unsplit",
        "attention + ffn",
        "max Δ log-prob",
        title="Greedy answers, one word per token",
        show_lines=True,
    )
    for one in compared:
        prompt = one.request.prompts[0].split()
        shown = " ".join(prompt[:4]) + (f" … ({len(prompt)} tokens)" if len(prompt) > 4 else "")
        style = "green" if one.difference.is_none else "red"
        table.add_row(shown, one.unsplit[0].text, one.split[0].text, f"[{style}]{one.difference.logprob}[/]")
    return table


def owners_table(parameters: dict[str, int], memory: dict[str, int], whole: int) -> Table:
    """Parameters and resident memory (PSS of the process tree) by process."""
    table = Table("process", title="Who holds what")
    for column in ("parameters", "share", "resident MiB"):
        table.add_column(column, justify="right")
    for name, count in parameters.items():
        table.add_row(name, f"{count:,}", f"{count / whole:.1%}", f"{memory[name] / 2**20:,.0f}")
    return table


def show(compared: list[Compared], unsplit: Server, halves: dict[str, Server], whole: int) -> bool:
    """Print both tables and the verdict; return whether the deployments are equal."""
    parameters = {"unsplit": whole} | {role: server.owned_parameters() for role, server in halves.items()}
    memory = {server.name: server.pss_bytes() for server in (unsplit, *halves.values())}
    console.print(answers_table(compared))
    console.print(owners_table(parameters, memory, whole))
    owned = sum(parameters[role] for role in halves)
    equal = all(one.difference.is_none for one in compared)
    if owned != whole:
        console.print(f"[red]attention and ffn hold {owned:,} parameters together, the checkpoint has {whole:,}[/]")
    console.print("[bold green]EQUAL[/]" if equal and owned == whole else "[bold red]DIFFERENT[/]")
    return equal and owned == whole


def run() -> bool:
    say(f"compiling {SPEC} against the installed vLLM", "bold")
    compile_wrappers()
    say(f"writing a random checkpoint to {FOLDER / 'checkpoint'}", "bold")
    checkpoint = write_checkpoint(FOLDER / "checkpoint", SIZE)
    whole = count_parameters(checkpoint)
    say(f"starting three servers for {whole:,} parameters; logs in {LOGS}", "bold")
    with serve("unsplit", checkpoint, LOGS, EAGER) as unsplit, split(checkpoint, LOGS, EAGER) as halves:
        wait_ready([unsplit, *halves.values()], START_SECONDS, say)
        say("all ready", "bold")
        equal = show(compare(unsplit, halves["attention"]), unsplit, halves, whole)
        say("stopping the servers")
    say("done")
    return equal


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Leave through the context managers that stop the servers, and let nothing interrupt that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        return 0 if run() else 1
    except KeyboardInterrupt:
        say("interrupted; everything started is stopped", "bold")
        return 130
    except subprocess.CalledProcessError as error:
        say(f"afd-compile ended with status {error.returncode}", "bold red")
    except ServerFailed as error:
        console.print(str(error), markup=False)
        console.print("[bold red]FAILED[/]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
