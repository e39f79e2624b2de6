"""What `afd-compile` shows people: in colour on a terminal, plain in a pipe."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from afd_compiler.changes import Change
from afd_compiler.discover import Found
from afd_compiler.outcome import Compiled, Outcome, Refusal
from afd_compiler.partition import BOTH
from afd_compiler.report import EmittedFile, diff_text, manifest_of
from afd_compiler.source import SourceTree

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=160)  # a pipe has no edge; tables need one


AROUND = "(registered model)"
"""In the place of a layer where there is none: the family is built around another registered model."""


def render_outcome(outcome: Outcome) -> None:
    """The boundary table of a proved layer, or the refusal."""
    if isinstance(outcome, Refusal):
        console.print(f"[red]refused[/] {outcome.origin.spec.family}")
        console.print(str(outcome.reason), markup=False)
        return
    manifest = manifest_of(outcome)
    table = Table(title=f"{manifest.family} of vLLM {manifest.vllm}", title_justify="left", show_header=False)
    for name in manifest.architectures:
        table.add_row("architecture", name)
    for name, place in outcome.classes.elsewhere:
        table.add_row("not here", f"{name}: {place}")
    for item, record in zip(outcome.layers, manifest.layers, strict=True):
        table.add_section()
        table.add_row("layer", f"{record.layer_class} ({item.layer.location})")
        for line, call in item.cut.region.boundary:
            table.add_row("cut", f"{item.file}:{line}  {call}")
        for value in record.cut:
            shape = f"[{', '.join(value.shape)}]".replace("[", r"\[")
            dtype = "dtype of the model" if value.dtype == "model" else "its own dtype"
            table.add_row(value.direction, f"{value.name} {shape}, {dtype}")
        for check in record.checks:
            table.add_row("[green]proved[/]", f"{check.name}: {check.variants} variants")
    table.add_section()
    for owner in dict.fromkeys(("attention", "ffn", *manifest.owners.values())):
        table.add_row(
            f"{owner} own{'s' * (owner != BOTH)}", ", ".join(p for p, o in manifest.owners.items() if o == owner)
        )
    for check in manifest.checks:
        table.add_row("[green]proved[/]", f"{check.name}: {check.variants} variants")
    console.print(table)


def render_list(tree: SourceTree, platform: str, outcomes: Iterable[Outcome]) -> None:
    """One line per family."""
    table = _table(tree, platform, "architectures")
    for outcome in outcomes:
        table.add_row(*_cells(outcome), ", ".join(outcome.origin.spec.architectures))
    console.print(table)


def render_found(
    tree: SourceTree, platform: str, found: Sequence[Found], outcomes: Sequence[Outcome], folder: Path
) -> None:
    """One line for each module that was found, and where its spec is; then the reasons of those that are refused."""
    if not found:
        console.print(f"nothing to write: {folder} covers what vLLM {tree.release} has for {platform}", soft_wrap=True)
        return
    table = _table(tree, platform, "found", "spec")
    for item, outcome in zip(found, outcomes, strict=True):
        file = f"{item.spec.family}.toml"
        what = f"wrote {file}" if item.new else f"add to {file}" if item.missing else f"has {file}"
        table.add_row(*_cells(outcome), ", ".join(item.missing or item.spec.architectures), what)
    console.print(table)
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            render_outcome(outcome)


def _table(tree: SourceTree, platform: str, *more: str) -> Table:
    table = Table(title=f"vLLM {tree.release}, {platform}", title_justify="left")
    for column in ("family", "layer", "verdict", *more):
        table.add_column(column)
    return table


def _cells(outcome: Outcome) -> tuple[str, str, str]:
    layer = ", ".join(item.name for item in outcome.classes.layers) or AROUND if outcome.classes else "-"
    refused = f"[red]refused[/]: {_reason(outcome)}"
    return outcome.origin.spec.family, layer, "[green]proved[/]" if isinstance(outcome, Compiled) else refused


def render_changes(changes: Iterable[Change]) -> None:
    """What changed at each family's boundary, old and new side by side; the reason where the new one is refused."""
    for change in changes:
        colour = "green" if change.same_behaviour else "red" if change.reason else "yellow"
        console.print(f"{change.family}, vLLM {change.old} to {change.new}: [{colour}]{change.verdict.value}[/]")
        if change.differences:
            table = Table("layer", "what", change.old, change.new, show_lines=True)
            for item in change.differences:
                table.add_row(item.layer, item.what, *(Text("\n".join(side)) for side in (item.old, item.new)))
            console.print(table)
        if change.reason:
            console.print(change.reason, markup=False)
        console.print(change.conclusion, markup=False)


def render_diff(drift: Iterable[EmittedFile], folder: Path) -> None:
    """A unified diff for each file that differs on disk."""
    for file in drift:
        text = diff_text(file, folder)
        console.print(Syntax(text, "diff", background_color="default") if console.is_terminal else text, markup=False)


def _reason(outcome: Outcome) -> str:
    return outcome.reason.kind.value if isinstance(outcome, Refusal) else ""
