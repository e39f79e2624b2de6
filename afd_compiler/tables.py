"""What a release comes to, in Markdown, for the project's own documents."""

from collections.abc import Sequence
from typing import Any

from afd_compiler.outcome import Outcome
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


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def _cut_or_reason(entry: dict[str, Any]) -> str:
    if entry["reason"]:
        return str(entry["reason"]).replace("|", "\\|")
    if not entry["variants"]:
        return f"{entry['at']}, around another registered model"
    return f"{entry['at']}, {len(entry['variants'])} variants"
