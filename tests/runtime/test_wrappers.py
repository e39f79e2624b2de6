"""Which wrapper is used: the one checked in, one compiled before, or one compiled now."""

import hashlib
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import platformdirs
import pytest
from pydantic import ValidationError

from afd_compiler.on_demand import OnDemandError
from afd_runtime import compiled, wrappers
from afd_runtime.errors import WrapperError
from afd_runtime.manifest import LAYER_CHECKS, MODULE_CHECKS, Check, Layer, Manifest, Roles, read_manifest
from afd_runtime.wrappers import Installed, Wrapper, find_wrapper

ARCHITECTURE = "TinyForCausalLM"
SOURCE = "vllm/model_executor/models/tiny.py"
SOURCE_SHA256 = hashlib.sha256(b"upstream").hexdigest()
ROLES = Roles(attention="AttentionTiny", ffn="FFNTiny")


PROVED = tuple(Check(name=name, result="passed", variants=2, detail="") for name in (*LAYER_CHECKS, *MODULE_CHECKS))


def write_wrapper(folder: Path, source_sha256: str = SOURCE_SHA256, checks: tuple[Check, ...] = PROVED) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / "tiny.py"
    module.write_text("MADE_BY = 'a test'\n")
    layer = Layer(
        layer_class="TinyDecoderLayer",
        source=SOURCE,
        behaviour_sha256="",
        boundary=(),
        overlap=False,
        variants=("one", "other"),
        exchanges=(1, 1),
        cut=(),
        owners={},
        checks=tuple(check for check in checks if check.name in LAYER_CHECKS),
    )
    manifest = Manifest(
        family="tiny",
        vllm="9.9.9",
        platform="cpu",
        compiler="0",
        sources={SOURCE: source_sha256},
        module_sha256=hashlib.sha256(module.read_bytes()).hexdigest(),
        architectures={ARCHITECTURE: ROLES},
        layers=(layer,),
        owners={},
        checks=tuple(check for check in checks if check.name in MODULE_CHECKS),
        verdict="proved",
    )
    (folder / "tiny.json").write_text(manifest.model_dump_json())
    return folder


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A release of vLLM with one model; the folder where its checked-in wrappers would be."""
    source = tmp_path / "site" / SOURCE
    source.parent.mkdir(parents=True)
    source.write_text("upstream")
    monkeypatch.setattr(wrappers, "installed_vllm", lambda: Installed("9.9.9", tmp_path / "site"))
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache")
    monkeypatch.setattr(wrappers, "_folders_of", lambda package: [tmp_path / "checked_in"])
    monkeypatch.setattr(compiled, "__path__", list(compiled.__path__))
    monkeypatch.setenv(compiled.FOLDERS, "")
    monkeypatch.setitem(sys.modules, "afd_compiler.on_demand", None)
    return tmp_path / "checked_in"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Path]]:
    """A compiler that writes one folder deeper than it is told; its calls."""
    calls: list[tuple[str, str, Path]] = []

    def compile_installed(architecture: str, platform: str, out: Path) -> Path:
        calls.append((architecture, platform, out))
        if architecture == "UnknownForCausalLM":
            raise OnDemandError("no model spec names UnknownForCausalLM")
        return write_wrapper(out / "vllm_9_9_9")

    module = ModuleType("afd_compiler.on_demand")
    module.__dict__.update(compile_installed=compile_installed, OnDemandError=OnDemandError)
    monkeypatch.setitem(sys.modules, "afd_compiler.on_demand", module)
    return calls


def test_the_one_checked_in(installed: Path) -> None:
    write_wrapper(installed)
    assert find_wrapper(ARCHITECTURE, "cpu") == Wrapper("afd_generated.vllm_9_9_9.tiny", ROLES)
    assert os.environ[compiled.FOLDERS] == ""


def test_other_source_is_compiled_once_and_importable_here_and_in_children(
    installed: Path, tmp_path: Path, compiler: list[tuple[str, str, Path]]
) -> None:
    write_wrapper(installed, source_sha256="b" * 64)
    for _ in range(2):
        assert find_wrapper(ARCHITECTURE, "cpu") == Wrapper("afd_runtime.compiled.tiny", ROLES)
    assert [call[:2] for call in compiler] == [(ARCHITECTURE, "cpu")]
    (folder,) = (tmp_path / "cache/generated").iterdir()
    assert folder.name.startswith("9.9.9-")
    assert os.environ[compiled.FOLDERS] == str(folder)
    assert importlib.import_module("afd_runtime.compiled.tiny").MADE_BY == "a test"
    del sys.modules["afd_runtime.compiled.tiny"]
    try:
        assert str(folder) in importlib.reload(compiled).__path__
    finally:
        os.environ[compiled.FOLDERS] = ""
        importlib.reload(compiled)


def test_a_release_without_a_wrapper_and_without_the_compiler() -> None:
    with pytest.raises(WrapperError) as error:
        find_wrapper(ARCHITECTURE, "cpu")
    assert str(error.value) == (
        "afd: no wrapper of TinyForCausalLM for vLLM 9.9.9 is installed, and the compiler is not here "
        "(import of afd_compiler.on_demand halted; None in sys.modules); "
        "do: pip install 'afd-compiler[compiler]', and TinyForCausalLM is compiled when vLLM starts, "
        "or run: afd-compile --all --vllm installed"
    )


def test_a_wrapper_of_other_source_and_no_compiler(installed: Path) -> None:
    write_wrapper(installed, source_sha256="b" * 64)
    with pytest.raises(WrapperError) as error:
        find_wrapper(ARCHITECTURE, "cpu")
    assert str(error.value) == (
        "afd: vllm/model_executor/models/tiny.py of vLLM 9.9.9 is not what its wrapper was compiled from, "
        "and the compiler is not here (import of afd_compiler.on_demand halted; None in sys.modules); "
        "do: pip install 'afd-compiler[compiler]', and TinyForCausalLM is compiled when vLLM starts, "
        "or run: afd-compile --all --vllm installed"
    )


def test_a_compiled_wrapper_of_older_source_is_left_and_another_is_made(
    tmp_path: Path, compiler: list[tuple[str, str, Path]]
) -> None:
    write_wrapper(tmp_path / "cache/generated/9.9.9-old", source_sha256="b" * 64)
    assert find_wrapper(ARCHITECTURE, "cpu").module == "afd_runtime.compiled.tiny"
    assert len(compiler) == 1
    assert len(list((tmp_path / "cache/generated").iterdir())) == 2


def test_a_compiler_that_makes_another_family(compiler: list[object]) -> None:
    with pytest.raises(WrapperError) as error:
        find_wrapper("OtherForCausalLM", "cpu")
    assert str(error.value) == (
        "afd: no wrapper of OtherForCausalLM for vLLM 9.9.9 is installed, and the compiler made none that fits"
    )


def test_a_family_that_the_compiler_refuses(compiler: list[object]) -> None:
    with pytest.raises(WrapperError) as error:
        find_wrapper("UnknownForCausalLM", "cpu")
    assert str(error.value) == (
        "afd: no wrapper of UnknownForCausalLM for vLLM 9.9.9 is installed; no model spec names UnknownForCausalLM"
    )


def test_a_wrapper_that_someone_edited(installed: Path) -> None:
    write_wrapper(installed)
    module = installed / "tiny.py"
    module.write_text("MADE_BY = 'hand'\n")
    with pytest.raises(WrapperError) as error:
        find_wrapper(ARCHITECTURE, "cpu")
    assert str(error.value) == (f"afd: {module} is not what the compiler wrote; do: afd-compile tiny --vllm 9.9.9")


INCOMPLETE = {
    "no check at all": ((), "translation, weight-cover, capture-safety, construction"),
    "a check left out": (PROVED[:3], "construction"),
    "a check of some variants only": (
        (PROVED[0].model_copy(update={"variants": 1}), *PROVED[1:]),
        "translation",
    ),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_a_wrapper_without_a_complete_verdict(installed: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, missing = INCOMPLETE[what]
    path = write_wrapper(installed, checks=checks) / "tiny.json"
    with pytest.raises(WrapperError) as error:
        find_wrapper(ARCHITECTURE, "cpu")
    assert str(error.value) == (
        f"afd: {path} records no proof of {missing} for all its variants; "
        "do: compile it again, or set AFD_ALLOW_UNVERIFIED=1 to serve it unproved"
    )
    monkeypatch.setenv("AFD_ALLOW_UNVERIFIED", "1")
    assert find_wrapper(ARCHITECTURE, "cpu").roles == ROLES


def test_a_manifest_of_another_format(installed: Path) -> None:
    path = write_wrapper(installed) / "tiny.json"
    assert read_manifest(path).architectures == {ARCHITECTURE: ROLES}
    path.write_text(path.read_text().replace('"family":', '"clan":'))
    with pytest.raises(ValidationError, match="family"):
        read_manifest(path)
