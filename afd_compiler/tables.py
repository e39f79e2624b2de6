"""What releases come to, in Markdown, for the project's own documents."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from afd_compiler.diagnostics import RefusalKind
from afd_compiler.outcome import Compiled, Outcome
from afd_compiler.report import layer_entries


def models_table(outcomes: Sequence[Outcome]) -> str:
    """One row per decoder layer of one release, platforms with the same verdict together."""
    found: dict[tuple[str, ...], list[str]] = {}
    proved: dict[str, list[bool]] = {}
    for outcome in outcomes:
        platform = outcome.origin.platform
        for entry in layer_entries(outcome):
            row = outcome.origin.spec.family, entry["layer_class"] or "-", entry["verdict"], _cut_or_reason(entry)
            found.setdefault(row, []).append(platform)
            proved.setdefault(platform, []).append(entry["verdict"] == "proved")
    release = outcomes[0].origin.release
    counts = "; ".join(f"{platform} {sum(layers)} of {len(layers)}" for platform, layers in proved.items())
    options = " ".join(f"--platform {platform}" for platform in proved)
    command = f"`afd-compile --all --vllm {release} {options} --table`"
    rows = [
        [family, layer, ", ".join(platforms), verdict, cut]
        for (family, layer, verdict, cut), platforms in sorted(found.items(), key=lambda item: item[0][0])
    ]
    head = f"# Models of vLLM {release}\n\nLayers proved: {counts}; by {command}."
    return f"{head}\n\n{_markdown(['family', 'decoder layer', 'platforms', 'verdict', 'cut, or reason'], rows)}"


@dataclass(slots=True)
class _Release:
    """What was found in one release, on any of its platforms; layers are (file, class)."""

    proved: set[tuple[str, str]] = field(default_factory=set)
    seen: set[tuple[str, str]] = field(default_factory=set)
    families: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def add(self, outcome: Outcome) -> None:
        family = outcome.origin.spec.family
        if isinstance(outcome, Compiled):
            self.families.add(family)
        elif outcome.reason.kind is not RefusalKind.ARCHITECTURE_MISSING:
            self.refused.add(family)
        layers = {(entry["file"], entry["layer_class"]) for entry in layer_entries(outcome) if entry["layer_class"]}
        self.seen |= layers
        self.proved |= layers if isinstance(outcome, Compiled) else set()


def releases_table(outcomes: Iterable[Outcome]) -> str:
    """One row per release, then one per family, with the releases in which some platform's layers are proved."""
    releases: dict[str, _Release] = {}
    platforms: dict[str, None] = {}
    for outcome in outcomes:
        platforms[outcome.origin.platform] = None
        releases.setdefault(outcome.origin.release, _Release()).add(outcome)
    rows = [
        [name, str(len(found.families)), str(len(found.proved)), str(len(found.seen)), _names(found)]
        for name, found in releases.items()
    ]
    families = sorted({name for found in releases.values() for name in found.families | found.refused})
    by_family = [
        [
            family,
            _ranges([family in found.families for found in releases.values()], [*releases]),
            _ranges([family in found.refused - found.families for found in releases.values()], [*releases]),
        ]
        for family in families
    ]
    options = " ".join(f"--platform {platform}" for platform in platforms)
    columns = ["vLLM", "families proved", "layers proved", "of", "families refused"]
    return (
        f"# Releases\n\nProved on at least one of {', '.join(platforms)}; a layer is a class in a file. Written by"
        f" `afd-compile --all --vllm all {options} --table`.\n\n{_markdown(columns, rows)}"
        f"\n{_markdown(['family', 'proved in', 'refused in'], by_family)}"
    )


def _names(found: _Release) -> str:
    return ", ".join(sorted(found.refused - found.families)) or "-"


def _ranges(holds: Sequence[bool], releases: Sequence[str]) -> str:
    """The releases for which something holds: "0.19.0 to 0.22.1, 0.33.0"."""
    groups: list[list[str]] = [[]]
    for release, held in zip(releases, holds, strict=True):
        if held:
            groups[-1].append(release)
        elif groups[-1]:
            groups.append([])
    return ", ".join(" to ".join(dict.fromkeys((group[0], group[-1]))) for group in groups if group) or "-"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def _cut_or_reason(entry: dict[str, Any]) -> str:
    if entry["reason"]:
        return str(entry["reason"]).replace("|", "\\|")
    if not entry["variants"]:
        return f"{entry['at']}, around another registered model"
    return f"{entry['at']}, {len(entry['variants'])} variants"
