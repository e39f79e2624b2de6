"""`afd-compile`: parses, calls, renders, exits; decides nothing."""

import json
from enum import StrEnum
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from afd_compiler import __version__
from afd_compiler.batch import compile_families
from afd_compiler.changes import Change, change_between, change_entry
from afd_compiler.diagnostics import Refused, UsageError
from afd_compiler.discover import discover
from afd_compiler.outcome import Compiled, Outcome
from afd_compiler.render import render_changes, render_diff, render_found, render_list, render_outcome
from afd_compiler.report import EmittedFile, drift_of, files_of, layer_entries, stale_files, write
from afd_compiler.source import RELEASE, RELEASES, SourceTree, find_sources
from afd_compiler.spec import SPEC_FOLDER, Spec, known_specs, load_spec, spec_text
from afd_compiler.symbols import Symbols
from afd_compiler.tables import models_table, releases_table

DONE, DRIFT, USAGE, REFUSED = 0, 1, 2, 3
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


class Platform(StrEnum):
    """For which platform's branches of the source."""

    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"
    rocm = "rocm"


class Mode(StrEnum):
    """What to do instead of writing wrappers; each is an option."""

    check = "check"
    diff = "diff"
    table = "table"
    list = "list"
    discover = "discover"


def _option(mode: Mode, text: str) -> object:
    return typer.Option(f"--{mode}", help=text)


@app.command()
def compile_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC…", help="A name in model_specs/, or a path; with --discover an architecture"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every spec in model_specs/")] = False,
    vllm: Annotated[
        list[str] | None,
        typer.Option(
            help="`installed` unless given, a release number, or a source directory; --diff takes two, --table several "
            "or `all`"
        ),
    ] = None,
    platform: Annotated[
        list[Platform] | None,
        typer.Option(help="Which platform's model source, else cpu; --table takes several"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; the afd_generated package unless given")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where files on disk differ")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Write nothing; show what would change on disk, or between two releases")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output")] = False,
    table: Annotated[bool, typer.Option("--table", help="Write nothing; Markdown, of layers or of releases")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Write nothing; list families and verdicts")] = False,
    discovering: Annotated[
        bool,
        typer.Option("--discover", help="Write a spec for each MoE architecture without one, or for that named"),
    ] = False,
    spec_folder: Annotated[
        Path, typer.Option("--specs", help="The folder of specs; model_specs/ unless given")
    ] = SPEC_FOLDER,
) -> None:
    """Split MoE models of a vLLM release between attention and FFN, prove the split, and write the wrappers.

    Exit codes: 0 done, 1 drift found by --check, 2 usage or bad spec, 3 a family that was named is refused.
    """
    given = names or []
    specs = [name for name in given if not RELEASE.fullmatch(name)]
    releases = [*(vllm or []), *filter(RELEASE.fullmatch, given)]  # `--vllm OLD NEW` means what it looks like
    releases = list(RELEASES) if releases == ["all"] else releases or ["installed"]
    platforms = [item.value for item in platform or [Platform.cpu]]
    try:
        if discovering and (every or check or diff or table or listing or len(specs) > 1):
            raise UsageError("--discover takes one architecture or none, and of the other modes --json alone")
        if len(releases) > 1 and not table and not (diff and len(releases) == 2):
            raise UsageError("several releases are for --table, and two for --diff")
        if len(platforms) > 1 and not table:
            raise UsageError("several platforms are for --table")
        chosen = [] if discovering else _chosen(specs, spec_folder, every=every or (listing and not specs))
        trees = find_sources(releases)
        if discovering:
            raise typer.Exit(_discover(specs, trees[0], platforms[0], spec_folder, as_json=as_json))
        folder = out or _generated_folder()
    except UsageError as error:
        errors.print(f"[red]error:[/] {error}", markup=True)
        raise typer.Exit(USAGE) from error
    outcomes = [outcome for name in platforms for outcome in _compiled(chosen, trees, name)]
    if table:
        typer.echo(releases_table(outcomes) if len(trees) > 1 else models_table(outcomes), nl=False)
    elif len(trees) > 1:
        old, outcomes = outcomes[: len(chosen)], outcomes[len(chosen) :]
        _show_changes([*map(change_between, old, outcomes)], as_json=as_json)
    if table or len(trees) > 1:
        raise typer.Exit(_exit_code([] if every else outcomes))
    proved = [outcome for outcome in outcomes if isinstance(outcome, Compiled)]
    files = list(dict.fromkeys(file for outcome in proved for file in files_of(outcome)))
    drift = (*drift_of(files, folder), *stale_files(outcomes, folder, every=every))
    if not (check or diff or listing):
        write(drift, folder)
    if as_json:
        typer.echo(json.dumps(_document(trees[0], platforms[0], outcomes, files), indent=2))
    elif listing:
        render_list(trees[0], platforms[0], outcomes)
    else:
        _render(trees[0], outcomes, drift, folder, show_diff=check or diff)
    raise typer.Exit(_exit_code([] if every else outcomes, drift if check else ()))


def main() -> None:
    """Entry point of the console script."""
    app()


def _chosen(names: list[str], folder: Path, *, every: bool) -> list[Spec]:
    if bool(names) == every:
        raise UsageError("name specs, or give --all\n  do: afd-compile --list shows them")
    return [load_spec(name, folder) for name in (known_specs(folder) if every else dict.fromkeys(names))]


def _compiled(specs: list[Spec], trees: list[SourceTree], platform: str) -> list[Outcome]:
    """By release, then by spec."""
    work = compile_families(specs, trees, platform)
    title = " to ".join(dict.fromkeys((trees[0].release, trees[-1].release)))
    total, hidden = len(specs) * len(trees), not errors.is_terminal
    done = list(track(work, title, total=total, console=errors, transient=True, disable=hidden))
    order = {(tree.release, spec): position for position, (tree, spec) in enumerate(product(trees, specs))}
    return sorted(done, key=lambda outcome: order[outcome.origin.release, outcome.origin.spec])


def _discover(names: list[str], tree: SourceTree, platform: str, folder: Path, *, as_json: bool) -> int:
    """Write the specs that are missing, and show what becomes of each; return the exit code."""
    specs = [load_spec(name, folder) for name in known_specs(folder)]
    try:
        found = discover(Symbols(tree, platform), specs, *names)
    except Refused as reason:
        errors.print(f"[red]refused[/] {names[0]}")
        errors.print(str(reason), markup=False)
        return REFUSED
    outcomes = _compiled([item.spec for item in found], [tree], platform) if found else []
    new = [EmittedFile(f"{item.spec.family}.toml", spec_text(item.spec)) for item in found if item.new]
    if taken := [file.path for file in new if (folder / file.path).exists()]:
        raise UsageError(f"{folder / taken[0]} is there and holds another family\n  do: give it its family's name")
    write(new, folder)
    if as_json:
        typer.echo(json.dumps(_document(tree, platform, outcomes, new), indent=2))
    else:
        render_found(tree, platform, found, outcomes, folder)
    return _exit_code(outcomes if names else [])


def _generated_folder() -> Path:
    found = find_spec("afd_generated")
    if found is None or found.origin is None:
        raise UsageError("the afd_generated package is not installed\n  do: name a folder with --out")
    return Path(found.origin).parent


def _document(tree: SourceTree, platform: str, outcomes: list[Outcome], files: list[EmittedFile]) -> dict[str, object]:
    return {
        "vllm": tree.release,
        "platform": platform,
        "compiler": __version__,
        "layers": [entry for outcome in outcomes for entry in layer_entries(outcome)],
        "files": [{"path": file.path, "sha256": file.sha256} for file in files],
    }


def _show_changes(changes: list[Change], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"compiler": __version__, "changes": list(map(change_entry, changes))}, indent=2))
    else:
        render_changes(changes)


def _render(
    tree: SourceTree, outcomes: list[Outcome], drift: tuple[EmittedFile, ...], folder: Path, *, show_diff: bool
) -> None:
    for outcome in outcomes:
        render_outcome(outcome)
    if show_diff:
        render_diff(drift, folder)
    elif drift:
        typer.echo("\n".join(f"{'wrote' if file.text else 'removed'} {folder / file.path}" for file in drift))
    else:
        typer.echo(f"nothing to write: {folder} holds what vLLM {tree.release} gives")


def _exit_code(outcomes: list[Outcome], drift: tuple[EmittedFile, ...] = ()) -> int:
    if not all(isinstance(outcome, Compiled) for outcome in outcomes):
        return REFUSED
    return DRIFT if drift else DONE
