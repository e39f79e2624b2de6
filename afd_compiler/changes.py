"""What a family's boundary came to between two releases, for the reviewer of an upgrade."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from afd_compiler.contract import CutValue
from afd_compiler.outcome import Compiled, CompiledLayer, Outcome, Refusal


class Verdict(Enum):
    SAME_CUT = "same cut"
    CHANGED_CUT = "changed cut"
    NEWLY_REFUSED = "newly refused"
    NEWLY_PROVED = "newly proved"
    REFUSED = "refused in both"


@dataclass(frozen=True, slots=True)
class Difference:
    """Something of a layer, or of the family where `layer` is empty, that is not as it was: the lines that differ, and
    of a cut all lines."""

    layer: str
    what: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One family in an old and a new release."""

    family: str
    old: str
    new: str
    verdict: Verdict
    differences: tuple[Difference, ...]
    reason: str | None
    """Why the new release is refused."""
    same_behaviour: bool
    """Whether it is proved that the old wrapper's halves and the new one's do the same."""

    @property
    def conclusion(self) -> str:
        if self.same_behaviour:
            return "wrapper unchanged in behaviour: each half is proved to do with its submodules what it did"
        if self.verdict is Verdict.SAME_CUT:
            return "wrapper cut the same; what upstream's layer does around the cut is not what it was"
        return {
            Verdict.CHANGED_CUT: "wrapper changed: review the cut",
            Verdict.NEWLY_PROVED: "wrapper is new: review it whole",
        }.get(self.verdict, "no wrapper for the new release")


CUT = ("cut", "to the FFN", "to attention", "owners", "FFN runs", "exchanges")
"""What makes a cut; anything else of a layer can change around it."""


def change_between(old: Outcome, new: Outcome) -> Change:
    """Compare two outcomes of one family."""
    differences = tuple(_differences(old, new))
    verdict = _verdict(old, new, differences)
    return Change(
        family=new.origin.spec.family,
        old=old.origin.release,
        new=new.origin.release,
        verdict=verdict,
        differences=differences,
        reason=str(new.reason) if isinstance(new, Refusal) else None,
        same_behaviour=verdict is Verdict.SAME_CUT and _behaviours(old) == _behaviours(new),
    )


def change_entry(change: Change) -> dict[str, Any]:
    """Element of `changes` in the JSON document."""
    return asdict(change) | {"verdict": change.verdict.value, "conclusion": change.conclusion}


def _verdict(old: Outcome, new: Outcome, differences: tuple[Difference, ...]) -> Verdict:
    if isinstance(new, Refusal):
        return Verdict.REFUSED if isinstance(old, Refusal) else Verdict.NEWLY_REFUSED
    if isinstance(old, Refusal):
        return Verdict.NEWLY_PROVED
    cuts = [item for item in differences if item.what in (*CUT, "layers")]
    return Verdict.CHANGED_CUT if cuts else Verdict.SAME_CUT


def _differences(old: Outcome, new: Outcome) -> Iterator[Difference]:
    if isinstance(old, Refusal) or isinstance(new, Refusal):
        return
    sides = [{item.layer.name: _facts(item) for item in outcome.layers} for outcome in (old, new)]
    facts = [{"architectures": tuple(name for name, _ in outcome.classes.architectures)} for outcome in (old, new)]
    if sides[0].keys() != sides[1].keys():
        facts = [facts[0] | {"layers": tuple(sides[0])}, facts[1] | {"layers": tuple(sides[1])}]
    yield from _unlike("", *facts)
    for name, before in sides[0].items():
        yield from _unlike(name, before, sides[1].get(name, before))


def _unlike(layer: str, old: Mapping[str, tuple[str, ...]], new: Mapping[str, tuple[str, ...]]) -> Iterator[Difference]:
    for what in old:
        sides = old[what], new[what]
        if sides[0] == sides[1]:
            continue
        unlike = tuple(tuple(line for line in side if line not in other) for side, other in (sides, sides[::-1]))
        yield Difference(layer, what, *(sides if what == "cut" or not any(unlike) else unlike))


def _facts(item: CompiledLayer) -> dict[str, tuple[str, ...]]:
    cut = item.cut
    return {
        "cut": tuple(call for _, call in cut.region.boundary),
        "to the FFN": tuple(map(_shown, cut.contract.sent)),
        "to attention": tuple(map(_shown, cut.contract.returned)),
        "owners": tuple(f"{name}: {role}" for name, role in cut.owners),
        "FFN runs": tuple(statement.partition("  ")[2] for statement in item.statements),
        "exchanges": tuple(map(str, sorted(set(cut.exchanges)))),
        "variants": item.proof.variants,
        "built": item.proof.built,
        "overlap": ("attention has work meanwhile",) if cut.overlap else (),
    }


def _shown(value: CutValue) -> str:
    return f"{value.name}[{', '.join(value.shape)}], {value.dtype}"


def _behaviours(outcome: Outcome) -> list[str]:
    return [item.proof.behaviour for item in outcome.layers] if isinstance(outcome, Compiled) else []
