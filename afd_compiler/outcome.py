"""What compiling one family comes to."""

from dataclasses import dataclass

from afd_compiler.classes import LayerClasses
from afd_compiler.diagnostics import Refused
from afd_compiler.partition import Partition
from afd_compiler.spec import Spec
from afd_compiler.verify import Proof


@dataclass(frozen=True, slots=True)
class Origin:
    """What a wrapper is made from."""

    spec: Spec
    release: str
    platform: str
    source_sha256: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """A wrapper that was proved."""

    origin: Origin
    classes: LayerClasses
    cut: Partition
    proof: Proof
    text: str
    statements: tuple[str, ...]
    """The statements of upstream's forward that the FFN role runs: "file:line  first line of the statement"."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A family that this release and platform cannot be split, and why."""

    origin: Origin
    classes: LayerClasses | None
    """None where the refusal came before the layer was found."""
    reason: Refused


Outcome = Compiled | Refusal
