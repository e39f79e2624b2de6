"""Where something stands upstream, and why the compiler refuses it."""

from dataclasses import dataclass
from enum import Enum
from functools import partial


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A line of an upstream file; `file` is relative to the source tree ("vllm/…")."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class RefusalKind(Enum):
    """What kind of thing the compiler could not account for."""

    ARCHITECTURE_MISSING = "architecture-missing"
    SOURCE_FAILED = "source-failed"
    NO_EXPERTS = "no-experts"
    NO_BOUNDARY = "no-boundary"
    UNTRACEABLE = "untraceable"
    TOO_MANY_VARIANTS = "too-many-variants"
    CONTRACT = "contract"
    SHARED_CONSTRUCTOR = "shared-constructor"
    OWNERLESS = "ownerless"
    UNREDUCED = "un-reduced"
    NO_FORM = "no-form"
    CONSTRUCTION = "construction"
    NOT_EQUAL = "not-equal"
    NOT_CAPTURE_SAFE = "not-capture-safe"


class Refused(Exception):
    """A pass cannot go on without guessing. Becomes a verdict in `pipeline`, and nowhere else."""

    def __init__(self, kind: RefusalKind, *, at: Location, name: str, saw: str, do: str) -> None:
        super().__init__(kind, at, name, saw, do)
        self.kind, self.at, self.name, self.saw, self.do = kind, at, name, saw, do

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Refused, self.kind, at=self.at, name=self.name, saw=self.saw, do=self.do), ()

    def __str__(self) -> str:
        return f"{self.at}: {self.name}: {self.saw} [{self.kind.value}]\n  do: {self.do}"


class UsageError(Exception):
    """Bad input from the person at the keyboard: a spec, a release, an option. Exit code 2."""
