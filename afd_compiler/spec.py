"""First pass: one TOML file per model family, validated."""

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afd_compiler.diagnostics import UsageError

SPEC_FOLDER = Path(__file__).resolve().parent.parent / "model_specs"
"""A sibling of the package, in the checkout and when installed."""
LINE_LENGTH = 100


class Spec(BaseModel):
    """What a family is called and where its model source is; everything else is detected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the emitted module."""
    module: str = Field(pattern=r"^vllm(\.\w+)+$")
    """Dotted name of the upstream module that holds the decoder layer."""
    architectures: tuple[str, ...] = Field(min_length=1)
    """Names in vLLM's model registry that this family serves."""


def load_spec(name: str, folder: Path = SPEC_FOLDER) -> Spec:
    """Read a spec by path or by its name in the folder; raise `UsageError` where it is missing or wrong."""
    path = find_spec_file(name, folder)
    try:
        return Spec.model_validate(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        problems = "\n".join(f"  {_field(item['loc'])}: {item['msg']}" for item in error.errors())
        raise UsageError(
            f"{path}: not a model spec:\n{problems}\n  do: see {SPEC_FOLDER.name}/ for examples"
        ) from error


def find_spec_file(name: str, folder: Path = SPEC_FOLDER) -> Path:
    """Return the file that `name` means: a path, or a name in the folder."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        if path.is_file():
            return path
        raise UsageError(f"{path}: no such spec file")
    named = folder / f"{name}.toml"
    if named.is_file():
        return named
    known = ", ".join(known_specs(folder)) or "none"
    raise UsageError(f"no spec is named {name!r}\n  do: give a path, or one of: {known}")


def known_specs(folder: Path = SPEC_FOLDER) -> tuple[str, ...]:
    """Names of the specs in the folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def spec_text(spec: Spec) -> str:
    """The TOML file that `load_spec` reads as this spec."""
    names = [f'"{name}"' for name in spec.architectures]
    line = f"architectures = [{', '.join(names)}]"
    if len(line) > LINE_LENGTH:
        line = "architectures = [\n" + "".join(f"    {name},\n" for name in names) + "]"
    return f'family = "{spec.family}"\nmodule = "{spec.module}"\n{line}\n'


def _field(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
