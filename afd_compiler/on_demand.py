"""Compiles a wrapper at serve time, when none was checked in for the installed vLLM. Called by the runtime only."""

from pathlib import Path

from afd_compiler.outcome import Refusal
from afd_compiler.pipeline import compile_family
from afd_compiler.report import files_of, write
from afd_compiler.source import installed_source
from afd_compiler.spec import Spec, known_specs, load_spec


class OnDemandError(RuntimeError):
    """The installed vLLM's architecture cannot be split, with the reason."""


def compile_installed(architecture: str, platform: str, out: Path) -> Path:
    """Compile the family of an architecture against the installed vLLM; return the folder that holds its files."""
    outcome = compile_family(_spec_of(architecture), installed_source(), platform)
    if isinstance(outcome, Refusal):
        raise OnDemandError(f"{architecture} cannot be split:\n{outcome.reason}")
    files = files_of(outcome)
    write(files, out)
    return (out / files[0].path).parent


def _spec_of(architecture: str) -> Spec:
    for spec in (load_spec(name) for name in known_specs()):
        if architecture in spec.architectures:
            return spec
    raise OnDemandError(f"no model spec names {architecture}\n  do: add it to a spec in model_specs/")
