"""What compiling one family comes to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afd_compiler.classes import FamilyClasses, LayerClass
from afd_compiler.diagnostics import Refused
from afd_compiler.partition import Partition
from afd_compiler.spec import Spec
from afd_compiler.symbols import Question
from afd_compiler.verify import Check, Proof


@dataclass(frozen=True, slots=True)
class Origin:
    """What a wrapper is made from."""

    spec: Spec
    release: str
    platform: str
    sources: tuple[tuple[str, str], ...]
    """(upstream file, sha256) of all files whose code was executed, the layer's first; none before it is found."""


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """A decoder layer, its cut and the proof of it."""

    layer: LayerClass
    cut: Partition
    proof: Proof
    file: str
    """Upstream's file that holds the layer's forward."""
    statements: tuple[str, ...]
    """The statements of upstream's forward that the FFN role runs: "file:line  first line of the statement"."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A wrapper that was proved."""

    origin: Origin
    classes: FamilyClasses
    layers: tuple[CompiledLayer, ...]
    construction: tuple[Check, ...]
    """What was proved of whole models."""
    text: str
    """The emitted module, without its header."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A family that this release and platform cannot be split, and why."""

    origin: Origin
    classes: FamilyClasses | None
    """None where the refusal came before the layers were found."""
    reason: Refused


Outcome = Compiled | Refusal


@dataclass(frozen=True, slots=True)
class Content:
    """What the passes after `classify` see of a source tree, but for the answers to what they ask about names."""

    classes: FamilyClasses
    sources: tuple[tuple[str, str], ...]
    """As in `Origin`."""
    defaults: tuple[tuple[tuple[str, str], ...], ...]
    """For each layer, (keyword, default) of its FFNs' forwards."""


@dataclass(frozen=True, slots=True)
class Result:
    """An outcome, and what it rests on: source trees alike in that come to the same."""

    outcome: Outcome
    content: Content | None
    """None where the refusal came before the layers were found."""
    answers: Mapping[Question, Any]
    """What was asked about names, mostly by the code that was executed."""
