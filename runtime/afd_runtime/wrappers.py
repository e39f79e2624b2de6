"""Finds the wrapper of an architecture for the installed vLLM: checked in, else cached, else compiled on demand."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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
    folder = _cache_folder(upstream)
    if next(_manifests(folder, architecture), None) is None:
        _compile(architecture, platform, folder, reason)
    for path, manifest in _manifests(folder, architecture):
        _export_folder(folder)
        return _checked(path, manifest, architecture, "afd_runtime.compiled")
    raise WrapperError(f"afd: {reason}, and the compiler made none from {upstream.source}")


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


def _cache_folder(upstream: Upstream) -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("afd-compiler") / "generated" / f"{upstream.release}-{upstream.sha256[:12]}"


def _compile(architecture: str, platform: str, folder: Path, reason: str) -> None:
    """Fill the folder at once, because both roles may come here at the same time."""
    try:
        from afd_compiler.on_demand import compile_installed
    except ImportError as error:
        raise WrapperError(
            f"afd: {reason}, and the compiler is not here ({error}); "
            f"do: pip install 'afd-compiler[compiler]', and {architecture} is compiled when vLLM starts"
        ) from None
    logger.warning("afd: %s; compiling it now into %s", reason, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(compile_installed(architecture, platform, Path(scratch)))
        with suppress(OSError):  # another process was first
            made.rename(folder)


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
