"""The command line as later checks call it: arguments, exit codes, and what is printed where."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afd_compiler import __version__, cli
from afd_compiler.source import SourceTree
from afd_runtime.manifest import read_manifest
from tests.compiler.conftest import MODEL, PACKAGES, TINY_FILE

SPEC = 'family = "tiny"\nmodule = "vllm.model_executor.models.tiny"\narchitectures = ["TinyForCausalLM"]\n'
CALL = "            hidden_states = self.ffn(hidden_states)\n"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, tiny_tree: Callable[..., SourceTree]) -> Run:
    """Run `afd-compile tiny.toml --vllm TREE --out OUT …`; returns exit code, standard output and standard error."""
    spec = tmp_path / "tiny.toml"
    spec.write_text(SPEC)

    def invoke(*options: str, edits: tuple[tuple[str, str], ...] = ()) -> tuple[int, str, str]:
        tree = tiny_tree(*edits)
        arguments = [str(spec), "--vllm", str(tree.root), "--out", str(tmp_path / "out"), *options]
        result = CliRunner().invoke(cli.app, arguments)
        return result.exit_code, result.stdout, result.stderr

    return invoke


def test_it_writes_then_has_nothing_to_write(run: Run, tmp_path: Path) -> None:
    code, first, _ = run()
    folder = tmp_path / "out" / "vllm_9_9_9"
    assert code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "__init__.py",
        "tiny.boundary.txt",
        "tiny.json",
        "tiny.py",
    ]
    assert f"wrote {folder / 'tiny.py'}" in first
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    code, second, _ = run()
    assert (code, before) == (0, {path: path.stat().st_mtime_ns for path in folder.iterdir()})
    assert second.splitlines()[-1] == f"nothing to write: {tmp_path / 'out'} holds what vLLM 9.9.9 gives"


def test_the_table_shows_cut_owners_and_proof(run: Run) -> None:
    _, shown, _ = run()
    for piece in (
        "TinyDecoderLayer (vllm/model_executor/models/tiny.py:41)",
        "vllm/model_executor/models/tiny.py:69  self.ffn(hidden_states, scaled=True)",
        "hidden_states [tokens, hidden], dtype of the model",
        "layers.*.self_attn, layers.*.norm1, layers.*.norm2, embed_tokens, norm",
        "translation: 12 variants",
    ):
        assert piece in " ".join(shown.split()) or piece in shown


def test_check_finds_drift_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    assert run("--check")[0] == 1
    assert not (tmp_path / "out").exists()
    run()
    assert run("--check")[0] == 0
    module = tmp_path / "out" / "vllm_9_9_9" / "tiny.py"
    text = module.read_text()
    module.write_text(text.replace("RemoteFfn", "Remote"))
    code, shown, _ = run("--check")
    assert code == 1
    assert "-class Remote(RemoteFFN):\n+class RemoteFfn(RemoteFFN):" in shown
    assert module.read_text() != text


def test_diff_shows_what_would_change_and_is_no_failure(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("--diff")
    assert code == 0
    assert "+class RemoteFfn(RemoteFFN):" in shown
    assert not (tmp_path / "out").exists()


def test_json_is_one_document_and_nothing_else(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("--json")
    document = json.loads(shown)
    assert code == 0
    assert list(document) == ["vllm", "platform", "compiler", "layers", "files"]
    assert (document["vllm"], document["platform"], document["compiler"]) == ("9.9.9", "cpu", __version__)
    (layer,) = document["layers"]
    keys = "spec architectures file layer_class verdict reason at variants cut owners checks"
    assert list(layer) == keys.split()
    assert (layer["verdict"], layer["reason"], layer["at"]) == ("proved", None, "vllm/model_executor/models/tiny.py:69")
    assert layer["cut"][0] == {
        "name": "hidden_states", "shape": ["tokens", "hidden"], "dtype": "model", "direction": "attention->ffn",
    }  # fmt: skip
    assert layer["owners"]["ffn"] == "ffn"
    manifest = read_manifest(tmp_path / "out" / "vllm_9_9_9" / "tiny.json")
    assert manifest.module_sha256 == {file["path"]: file["sha256"] for file in document["files"]}["vllm_9_9_9/tiny.py"]


def test_a_refusal_is_exit_3_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    edits = ((CALL, f"            for _ in (1,):\n    {CALL}"),)
    code, shown, _ = run(edits=edits)
    assert code == 3
    assert "refused tiny\nvllm/model_executor/models/tiny.py:72: forward: FFN work inside a `For`" in shown
    assert not (tmp_path / "out").exists()
    code, shown, _ = run("--json", edits=edits)
    (layer,) = json.loads(shown)["layers"]
    assert (code, layer["verdict"], layer["at"]) == (3, "refused", "vllm/model_executor/models/tiny.py:72")
    assert "FFN work inside a `For` statement [no-form]; do: serve this family unsplit" in layer["reason"]


def test_list_shows_families_and_verdicts(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("--list")
    assert code == 0
    assert "tiny" in shown
    assert "proved" in shown
    assert not (tmp_path / "out").exists()


def test_table_is_markdown_with_a_row_for_each_layer_and_its_platforms(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("--table", "--platform", "cpu", "--platform", "cuda")
    assert code == 0
    command = "`afd-compile --all --vllm 9.9.9 --platform cpu --platform cuda --table`"
    assert shown.splitlines()[2] == f"Layers proved: cpu 1 of 1; cuda 1 of 1; by {command}."
    place = "vllm/model_executor/models/tiny.py:69, 12 variants"
    assert shown.splitlines()[-1] == f"| tiny | TinyDecoderLayer | cpu, cuda | proved | {place} |"
    assert not (tmp_path / "out").exists()


def test_several_releases_are_a_table_of_releases(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("--table", "--vllm", newer(tmp_path))
    assert code == 0
    assert "| 9.9.9 | 1 | 1 | 1 | - |\n| 9.9.10 | 1 | 1 | 1 | - |\n" in shown
    assert "| tiny | 9.9.9 to 9.9.10 | - |\n" in shown


def test_diff_of_two_releases_shows_the_cut_side_by_side(run: Run, tmp_path: Path) -> None:
    changed = ("self.ffn(hidden_states, scaled=True)", "self.ffn(hidden_states, scaled=False)")
    code, shown, _ = run("--diff", "--vllm", newer(tmp_path, changed))
    assert code == 0
    assert shown.startswith("tiny, vLLM 9.9.9 to 9.9.10: changed cut\n")
    sides = "│ self.ffn(hidden_states, scaled=True) │ self.ffn(hidden_states, scaled=False)"
    assert sides in " ".join(shown.split())
    assert shown.endswith("wrapper changed: review the cut\n")
    assert not (tmp_path / "out").exists()


def test_diff_of_two_releases_as_json(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("--diff", "--json", "--vllm", newer(tmp_path))
    (change,) = json.loads(shown)["changes"]
    assert code == 0
    assert change == {
        "family": "tiny",
        "old": "9.9.9",
        "new": "9.9.10",
        "verdict": "same cut",
        "differences": [],
        "reason": None,
        "same_behaviour": True,
        "conclusion": "wrapper unchanged in behaviour: each half is proved to do with its submodules what it did",
    }


def test_diff_with_a_release_that_is_refused(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("--diff", "--vllm", newer(tmp_path, (CALL, f"            for _ in (1,):\n    {CALL}")))
    assert code == 3
    assert shown.startswith(
        "tiny, vLLM 9.9.9 to 9.9.10: newly refused\nvllm/model_executor/models/tiny.py:72: forward:"
    )
    assert shown.endswith("no wrapper for the new release\n")


def newer(tmp_path: Path, *edits: tuple[str, str]) -> str:
    """A copy of the tree as the next release, edited."""
    root = tmp_path / "newer"
    text = MODEL.read_text()
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    for path, content in {**PACKAGES, TINY_FILE: text}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content.replace("9.9.9", "9.9.10"))
    return str(root)


def test_files_of_a_family_that_is_refused_now_are_drift_and_go(run: Run, tmp_path: Path) -> None:
    refused = ((CALL, f"            for _ in (1,):\n    {CALL}"),)
    folder = tmp_path / "out" / "vllm_9_9_9"
    run()
    code, shown, _ = run("--check", edits=refused)
    assert code == 3
    assert "-class RemoteFfn(RemoteFFN):" in shown
    run("--platform", "cuda", edits=refused)
    assert len([*folder.iterdir()]) == 4  # another platform's refusal says nothing of these
    code, shown, _ = run(edits=refused)
    assert f"removed {folder / 'tiny.py'}" in shown
    assert [path.name for path in folder.iterdir()] == ["__init__.py"]


def test_all_finds_files_of_families_without_a_spec(run: Run, tmp_path: Path) -> None:
    run()
    (tmp_path / "specs").mkdir()
    other = SPEC.replace('family = "tiny"', 'family = "renamed"')
    (tmp_path / "specs" / "renamed.toml").write_text(other)
    tree, out = tmp_path / "tree", tmp_path / "out"
    every = ["--all", "--specs", str(tmp_path / "specs"), "--vllm", str(tree), "--out", str(out)]
    assert CliRunner().invoke(cli.app, every).exit_code == 0
    assert sorted(path.name for path in (out / "vllm_9_9_9").iterdir()) == [
        "__init__.py",
        "renamed.boundary.txt",
        "renamed.json",
        "renamed.py",
    ]
    assert CliRunner().invoke(cli.app, [*every, "--check"]).exit_code == 0


USAGE = {
    "no spec": ([], "error: name specs, or give --all\n  do: afd-compile --list shows them\n"),
    "spec and --all": (
        ["deepseek_v2", "--all"],
        "error: name specs, or give --all\n  do: afd-compile --list shows them\n",
    ),
    "several platforms": (
        ["--all", "--platform", "cpu", "--platform", "cuda"],
        "error: several platforms are for --table\n",
    ),
    "several releases": (
        ["--all", "--check", "--vllm", "0.32.0", "0.33.0"],
        "error: several releases are for --table, and two for --diff\n",
    ),
    "no such release": (
        ["--all", "--vllm", "newest"],
        "error: --vllm newest: neither `installed`, nor a directory, nor a release number\n",
    ),
}


@pytest.mark.parametrize("what", USAGE)
def test_usage_errors_are_exit_2_and_leave_standard_output_alone(what: str) -> None:
    arguments, text = USAGE[what]
    result = CliRunner().invoke(cli.app, arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", text)


def test_an_unknown_option_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli.app, ["--all", "--colour"]).exit_code == 2
