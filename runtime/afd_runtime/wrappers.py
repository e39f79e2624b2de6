"""Finds the wrapper of an architecture for the installed vLLM: checked in, else cached, else compiled on demand."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afd_runtime.errors import WrapperError
from afd_runtime.log import init_logger
from afd_runtime.manifest import Manifest, Roles, read_manifest

logger = init_logger(__name__)

ALIASES = "AFD_ALIASES"
"""Environment variable: JSON of alias architectures to "module:class"; child processes inherit it."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The installed file that defines an architecture."""

    release: str
    """Without a build label."""
    path: Path
    source: str
    """The path below the folder that holds the vllm package, with slashes."""
    sha256: str


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Class names of both roles, in an importable module."""

    module: str
    roles: Roles


def alias_of(role: str, architecture: str) -> str:
    return f"{_prefix(role)}{architecture}"


def native_of(architecture: str) -> str:
    """The native name of an architecture, which may be an alias already."""
    for role in ("attention", "ffn"):
        if architecture.startswith(_prefix(role)):
            return architecture.removeprefix(_prefix(role))
    return architecture


def find_wrapper(architecture: str, platform: str) -> Wrapper:
    """Raise `WrapperError` if there is none and none can be made."""
    upstream = installed_source(architecture)
    package = f"afd_generated.vllm_{upstream.release.replace('.', '_')}"
    reason = f"no wrapper of {architecture} for vLLM {upstream.release} is installed"
    for folder in _folders_of(package):
        for path, manifest in _manifests(folder, architecture):
            if manifest.source_sha256 == upstream.sha256:
                return _checked(path, manifest, architecture, package)
            reason = f"{upstream.source} of vLLM {upstream.release} is not the file that its wrapper was compiled from"
    folder = _compiled_folder(architecture, platform, upstream, reason)
    for path, manifest in _manifests(folder, architecture):
        if manifest.source_sha256 == upstream.sha256:
            _export_folder(folder)
            return _checked(path, manifest, architecture, "afd_runtime.compiled")
    raise WrapperError(
        f"afd: the compiler wrote no wrapper of {architecture} to {folder}; do: {_command(architecture)}"
    )


def installed_source(architecture: str) -> Upstream:
    """Ask vLLM's registry which file defines an architecture; imports no model."""
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    module = getattr(ModelRegistry.models.get(architecture), "module_name", None)
    spec = importlib.util.find_spec(module) if module else None
    if spec is None or spec.origin is None:
        raise WrapperError(
            f"afd: vLLM {vllm.__version__} knows no source file of {architecture}; is it a model of vLLM?"
        )
    path = Path(spec.origin)
    root = Path(vllm.__file__).parent.parent
    source = path.relative_to(root).as_posix()
    return Upstream(vllm.__version__.split("+")[0], path, source, _sha256(path))


def register_aliases(aliases: dict[str, str]) -> None:
    """Make alias architectures known in this process and in those that it starts."""
    from vllm.model_executor.models.registry import ModelRegistry

    for alias, target in aliases.items():
        ModelRegistry.register_model(alias, target)
    os.environ[ALIASES] = json.dumps({**inherited_aliases(), **aliases})


def inherited_aliases() -> dict[str, str]:
    aliases: dict[str, str] = json.loads(os.environ.get(ALIASES, "{}"))
    return aliases


def _compiled_folder(architecture: str, platform: str, upstream: Upstream, reason: str) -> Path:
    from platformdirs import user_cache_path

    folder = user_cache_path("afd-compiler") / "generated" / f"{upstream.release}-{upstream.sha256[:12]}"
    for found in (folder, *folder.glob("**/")):
        if next(_manifests(found, architecture), None) is not None:
            logger.info("afd: %s; using the one compiled before in %s", reason, found)
            return found
    try:
        from afd_compiler.on_demand import compile_installed
    except ImportError as error:
        raise WrapperError(
            f"afd: {reason}, and the compiler is not here ({error}); do: {_command(architecture)}"
        ) from None
    logger.warning("afd: %s; compiling it now into %s", reason, folder)
    return Path(compile_installed(architecture, platform, folder))


def _command(architecture: str) -> str:
    return f"pip install 'afd-compiler[compiler]', and {architecture} is compiled when vLLM starts"


def _folders_of(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _manifests(folder: Path, architecture: str) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted(folder.glob("*.json")):
        manifest = read_manifest(path)
        if architecture in manifest.architectures:
            yield path, manifest


def _checked(path: Path, manifest: Manifest, architecture: str, package: str) -> Wrapper:
    module = path.with_suffix(".py")
    if _sha256(module) != manifest.module_sha256:
        raise WrapperError(
            f"afd: {module} is not what the compiler wrote; do: afd-compile {manifest.family} --vllm {manifest.vllm}"
        )
    return Wrapper(f"{package}.{manifest.family}", manifest.architectures[architecture])


def _export_folder(folder: Path) -> None:
    from afd_runtime import compiled

    known = os.environ.get(compiled.FOLDERS, "")
    if str(folder) not in known.split(os.pathsep):
        os.environ[compiled.FOLDERS] = os.pathsep.join(filter(None, (known, str(folder))))
    if str(folder) not in compiled.__path__:
        compiled.__path__.append(str(folder))


def _prefix(role: str) -> str:
    return "AFDAttention" if role == "attention" else "AFDFFN"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
