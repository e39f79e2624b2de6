"""What the compiler records beside each emitted module, and the runtime checks before it uses the module."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

REQUIRED_CHECKS = ("translation", "weight-cover", "capture-safety", "construction")
"""What must have been proved, for every variant, before a wrapper may serve."""
Direction = Literal["attention->ffn", "ffn->attention"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Value(_Record):
    """One value that crosses the boundary."""

    name: str
    shape: tuple[str, ...]
    """In symbols, for instance ("tokens", "hidden")."""
    dtype: str
    direction: Direction


class Check(_Record):
    """One proof obligation; a module with one that failed is never written."""

    name: str
    result: Literal["passed"]
    variants: int
    detail: str


class Roles(_Record):
    """Class names in the emitted module, by role."""

    attention: str
    ffn: str


class Manifest(_Record):
    """`<family>.json` beside `<family>.py`."""

    format: int = 1
    family: str
    vllm: str
    """Release without a build label, for instance "0.32.0"."""
    platform: str
    compiler: str
    source: str
    """Upstream file, relative to the folder that holds the vllm package."""
    source_sha256: str
    module_sha256: str
    """Of the emitted `.py`."""
    behaviour_sha256: str
    """Of what upstream's layer does in all its variants, whatever the lines it stands on."""
    layer_class: str
    boundary: tuple[str, ...]
    architectures: dict[str, Roles]
    """By native architecture name."""
    variants: tuple[str, ...]
    cut: tuple[Value, ...]
    owners: dict[str, str]
    """Module path to role."""
    checks: tuple[Check, ...]
    verdict: Literal["proved"]

    def unproved(self) -> tuple[str, ...]:
        """Names of required checks that are missing, or that do not cover every variant."""
        covered = {check.name for check in self.checks if check.variants == len(self.variants)}
        return tuple(name for name in REQUIRED_CHECKS if not self.variants or name not in covered)


def read_manifest(path: Path) -> Manifest:
    """Raise pydantic's ValidationError, which names the field, when the file has another shape."""
    return Manifest.model_validate_json(path.read_bytes())
