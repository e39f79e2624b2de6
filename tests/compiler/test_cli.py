"""The command line as later checks call it: arguments, exit codes, and what is printed where."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afd_compiler import __version__, cli
from afd_compiler.source import SourceTree
from afd_runtime.manifest import read_manifest

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
