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

ALLOW_UNVERIFIED = "AFD_ALLOW_UNVERIFIED"
"""Environment variable: "1" lets a wrapper without a complete verdict serve."""
ROLES = ("attention", "ffn")
ALIASES = "AFD_ALIASES"
"""Environment variable: JSON of alias architectures to "module:class"; child processes inherit it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The vLLM that runs here."""

    release: str
    """Without a build label."""
    root: Path
    """The folder that holds the vllm package."""

    def has_source_of(self, manifest: Manifest) -> bool:
        """Whether the files that a wrapper was compiled from are the ones that are installed."""
        files = ((self.root / source, digest) for source, digest in manifest.sources.items())
        return all(file.is_file() and _sha256(file) == digest for file, digest in files)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Class names of both roles, in an importable module."""

    module: str
    roles: Roles


def alias_of(role: str, architecture: str) -> str:
    return f"{_prefix(role)}{architecture}"


def native_of(architecture: str) -> str:
    """The native name of an architecture, which may be an alias already."""
    for role in ROLES:
        if architecture.startswith(_prefix(role)):
            return architecture.removeprefix(_prefix(role))
    return architecture


def role_alias(role: str, native: str) -> str:
    """The name that vLLM's registry now knows the role's part of an architecture by; raise `WrapperError` as below."""
    wrapper = find_wrapper(native, _platform_name())
    alias = alias_of(role, native)
    if alias not in inherited_aliases():
        logger.info("afd: role %s serves %s as %s from %s", role, native, alias, wrapper.module)
    register_aliases({alias_of(each, native): f"{wrapper.module}:{getattr(wrapper.roles, each)}" for each in ROLES})
    return alias


def find_wrapper(architecture: str, platform: str) -> Wrapper:
    """Raise `WrapperError` if there is none and none can be made."""
    vllm = installed_vllm()
    package = f"afd_generated.vllm_{vllm.release.replace('.', '_')}"
    reason = f"no wrapper of {architecture} for vLLM {vllm.release} is installed"
    for path, manifest in _manifests(_folders_of(package), architecture):
        if vllm.has_source_of(manifest):
            return _checked(path, manifest, architecture, package)
        files = ", ".join(manifest.sources)
        reason = f"{files} of vLLM {vllm.release} is not what its wrapper was compiled from"
    if not (found := _compiled(vllm, architecture)):
        _compile(architecture, platform, vllm, reason)
        found = _compiled(vllm, architecture)
    if not found:
        raise WrapperError(f"afd: {reason}, and the compiler made none that fits")
    path, manifest = found
    _export_folder(path.parent)
    return _checked(path, manifest, architecture, "afd_runtime.compiled")


def installed_vllm() -> Installed:
    import vllm

    return Installed(vllm.__version__.split("+")[0], Path(vllm.__file__).parent.parent)


def register_aliases(aliases: dict[str, str]) -> None:
    """Make alias architectures known in this process and in those that it starts."""
    from vllm.model_executor.models.registry import ModelRegistry

    for alias, target in aliases.items():
        ModelRegistry.register_model(alias, target)
    os.environ[ALIASES] = json.dumps({**inherited_aliases(), **aliases})


def inherited_aliases() -> dict[str, str]:
    aliases: dict[str, str] = json.loads(os.environ.get(ALIASES, "{}"))
    return aliases


def _compiled(vllm: Installed, architecture: str) -> tuple[Path, Manifest] | None:
    """A wrapper that was compiled on demand before, from the source that is installed."""
    fitting = ((path, found) for path, found in _manifests(_cached(vllm), architecture) if vllm.has_source_of(found))
    return next(fitting, None)


def _cached(vllm: Installed) -> list[Path]:
    return sorted(_cache().glob(f"{vllm.release}-*/"))


def _cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("afd-compiler") / "generated"


def _compile(architecture: str, platform: str, vllm: Installed, reason: str) -> None:
    """Add a folder to the cache, named by its content, and whole when it appears: both roles may come at once."""
    try:
        from afd_compiler.on_demand import OnDemandError, compile_installed
    except ImportError as error:
        raise WrapperError(
            f"afd: {reason}, and the compiler is not here ({error}); do: pip install 'afd-compiler[compiler]', "
            f"and {architecture} is compiled when vLLM starts, or run: afd-compile --all --vllm installed"
        ) from None
    cache = _cache()
    logger.warning("afd: %s; compiling it now into %s", reason, cache)
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as scratch:
        try:
            made = Path(compile_installed(architecture, platform, Path(scratch)))
        except OnDemandError as error:
            raise WrapperError(f"afd: {reason}; {error}") from error
        content = "".join(_sha256(path) for path in sorted(made.glob("*.json")))
        with suppress(OSError):  # another process was first, with the same content
            made.rename(cache / f"{vllm.release}-{hashlib.sha256(content.encode()).hexdigest()[:12]}")


def _folders_of(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _manifests(folders: list[Path], architecture: str) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        manifest = read_manifest(path)
        if architecture in manifest.architectures:
            yield path, manifest


def _checked(path: Path, manifest: Manifest, architecture: str, package: str) -> Wrapper:
    module = path.with_suffix(".py")
    if _sha256(module) != manifest.module_sha256:
        raise WrapperError(
            f"afd: {module} is not what the compiler wrote; do: afd-compile {manifest.family} --vllm {manifest.vllm}"
        )
    if missing := manifest.unproved():
        _unverified(f"afd: {path} records no proof of {', '.join(missing)} for all its variants")
    return Wrapper(f"{package}.{manifest.family}", manifest.architectures[architecture])


def _unverified(problem: str) -> None:
    if os.environ.get(ALLOW_UNVERIFIED) != "1":
        raise WrapperError(f"{problem}; do: compile it again, or set {ALLOW_UNVERIFIED}=1 to serve it unproved")
    logger.warning("%s; serving it all the same, because %s=1", problem, ALLOW_UNVERIFIED)


def _export_folder(folder: Path) -> None:
    from afd_runtime import compiled

    known = os.environ.get(compiled.FOLDERS, "")
    if str(folder) not in known.split(os.pathsep):
        os.environ[compiled.FOLDERS] = os.pathsep.join(filter(None, (known, str(folder))))
    if str(folder) not in compiled.__path__:
        compiled.__path__.append(str(folder))


def _platform_name() -> str:
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def _prefix(role: str) -> str:
    return "AFDAttention" if role == "attention" else "AFDFFN"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
