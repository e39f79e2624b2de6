"""First pass: one TOML file per model family, validated."""

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afd_compiler.diagnostics import UsageError

SPEC_FOLDER = Path(__file__).resolve().parent.parent / "model_specs"
"""A sibling of the package, in the checkout and when installed."""


class Spec(BaseModel):
    """What a family is called and where its model source is; everything else is detected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the emitted module."""
    module: str = Field(pattern=r"^vllm(\.\w+)+$")
    """Dotted name of the upstream module that holds the decoder layer."""
    architectures: tuple[str, ...] = Field(min_length=1)
    """Names in vLLM's model registry that this family serves."""


def load_spec(name: str) -> Spec:
    """Read a spec by path or by its name in `model_specs/`; raise `UsageError` where it is missing or wrong."""
    path = find_spec_file(name)
    try:
        return Spec.model_validate(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        problems = "\n".join(f"  {_field(item['loc'])}: {item['msg']}" for item in error.errors())
        raise UsageError(
            f"{path}: not a model spec:\n{problems}\n  do: see {SPEC_FOLDER.name}/ for examples"
        ) from error


def find_spec_file(name: str) -> Path:
    """Return the file that `name` means: a path, or a name in `model_specs/`."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        if path.is_file():
            return path
        raise UsageError(f"{path}: no such spec file")
    named = SPEC_FOLDER / f"{name}.toml"
    if named.is_file():
        return named
    known = ", ".join(known_specs()) or "none"
    raise UsageError(f"no spec is named {name!r}\n  do: give a path, or one of: {known}")


def known_specs() -> tuple[str, ...]:
    """Names of the specs in `model_specs/`, sorted."""
    return tuple(sorted(path.stem for path in SPEC_FOLDER.glob("*.toml")))


def _field(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
