"""What the compiler records beside each emitted module, and the runtime checks before it uses the module."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

LAYER_CHECKS = ("translation", "weight-cover", "capture-safety")
"""What must have been proved of each layer, for every variant, before a wrapper may serve."""
MODULE_CHECKS = ("construction",)
"""What must have been proved of the whole."""
AROUND_CHECKS = (*MODULE_CHECKS, "registered-model")
"""What must have been proved of a module without layers, which is built around another model of the registry."""
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


class Layer(_Record):
    """A decoder layer: where it is cut, what crosses, who owns what, and what was proved."""

    layer_class: str
    source: str
    """Upstream file, relative to the folder that holds the vllm package."""
    behaviour_sha256: str
    """Of what upstream's layer does in all its variants, whatever the lines it stands on."""
    boundary: tuple[str, ...]
    overlap: bool
    """Whether attention has work that could run while the FFN does its own."""
    variants: tuple[str, ...]
    exchanges: tuple[int, ...]
    """Of each variant."""
    cut: tuple[Value, ...]
    owners: dict[str, str]
    """Submodule of the layer to role."""
    checks: tuple[Check, ...]

    def unproved(self) -> tuple[str, ...]:
        """Names of required checks that are missing, or that do not cover every variant."""
        covered = {check.name for check in self.checks if check.variants == len(self.variants)}
        return tuple(name for name in LAYER_CHECKS if not self.variants or name not in covered)


class Manifest(_Record):
    """`<family>.json` beside `<family>.py`."""

    format: int = 2
    family: str
    vllm: str
    """Release without a build label, for instance "0.32.0"."""
    platform: str
    compiler: str
    sources: dict[str, str]
    """Upstream file, relative to the folder that holds the vllm package, to sha256: all that the proof rests on."""
    module_sha256: str
    """Of the emitted `.py`."""
    architectures: dict[str, Roles]
    """By native architecture name."""
    layers: tuple[Layer, ...]
    owners: dict[str, str]
    """Module path to role: of the layers' submodules and of what stands around the layers."""
    checks: tuple[Check, ...]
    verdict: Literal["proved"]

    def unproved(self) -> tuple[str, ...]:
        """Names of required checks that are missing, or that do not cover every variant."""
        if not self.layers:
            tried = {check.name for check in self.checks if check.variants}
            return tuple(name for name in AROUND_CHECKS if name not in tried)
        variants = sum(len(layer.variants) for layer in self.layers)
        covered = {check.name for check in self.checks if check.variants == variants}
        whole = tuple(name for name in MODULE_CHECKS if name not in covered)
        return (*(name for layer in self.layers for name in layer.unproved()), *whole)


def read_manifest(path: Path) -> Manifest:
    """Raise pydantic's ValidationError, which names the field, when the file has another shape."""
    return Manifest.model_validate_json(path.read_bytes())
