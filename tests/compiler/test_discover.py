"""`afd-compile --discover`: what of a registry no spec covers, what is written, and what is said of the rest."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afd_compiler import cli
from afd_compiler.discover import Found, discover
from afd_compiler.source import SourceTree
from afd_compiler.spec import Spec, load_spec
from afd_compiler.symbols import Symbols

MODELS = "vllm.model_executor.models"
REGISTRY = """MODELS = {
    "TinyForCausalLM": ("tiny", "TinyForCausalLM"),
    "TinyMTPModel": ("tiny_mtp", "TinyMTP"),
    "TinyMTP2Model": ("tiny_mtp", "TinyMTP"),
    "TinyAliasForCausalLM": ("tiny_alias", "TinyForCausalLM"),
    "PlainForCausalLM": ("plain", "PlainForCausalLM"),
    "GoneForCausalLM": ("gone", "GoneForCausalLM"),
}
"""
FILES = {
    "vllm/model_executor/models/registry.py": REGISTRY,
    "vllm/model_executor/models/tiny_mtp.py": (
        "from torch import nn\n\nfrom vllm.model_executor.models.tiny import TinyDecoderLayer\n\n\n"
        "class TinyMTP(nn.Module):\n    def __init__(self, *, vllm_config, prefix=''):\n        super().__init__()\n"
        "        self.layer = TinyDecoderLayer(vllm_config, prefix=f'{prefix}.layers.0')\n"
    ),
    "vllm/model_executor/models/tiny_alias.py": "from vllm.model_executor.models.tiny import TinyForCausalLM\n",
    "vllm/model_executor/models/plain.py": (
        "from torch import nn\n\n\nclass PlainForCausalLM(nn.Module):\n    def __init__(self, *, vllm_config):\n"
        "        super().__init__()\n"
    ),
}
TINY = Spec(family="tiny", module=f"{MODELS}.tiny", architectures=("TinyForCausalLM",))
MTP = Spec(family="tiny_mtp", module=f"{MODELS}.tiny_mtp", architectures=("TinyMTPModel", "TinyMTP2Model"))
CALL = "            hidden_states = self.ffn(hidden_states)\n"
LOOP = (CALL, f"            for _ in (1,):\n    {CALL}")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def symbols(tiny_tree: Callable[..., SourceTree]) -> Symbols:
    return Symbols(tiny_tree(**FILES), "cpu")


@pytest.fixture
def run(tmp_path: Path, tiny_tree: Callable[..., SourceTree]) -> Run:
    """Run `afd-compile … --discover --vllm TREE --specs SPECS`; returns exit code, standard output and error."""

    def invoke(*options: str, edits: tuple[tuple[str, str], ...] = ()) -> tuple[int, str, str]:
        tree = tiny_tree(*edits, **FILES)
        result = CliRunner().invoke(
            cli.app, ["--discover", "--vllm", str(tree.root), "--specs", str(tmp_path / "specs"), *options]
        )
        return result.exit_code, result.stdout, result.stderr

    return invoke


def rows(shown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line[:1] == "│"]


def test_one_spec_for_each_module_and_an_existing_family_keeps_its_own(symbols: Symbols) -> None:
    tiny = Spec(family="tiny", module=f"{MODELS}.tiny", architectures=("TinyForCausalLM", "TinyAliasForCausalLM"))
    assert discover(symbols, []) == (
        Found(tiny, tiny.architectures, new=True),
        Found(MTP, MTP.architectures, new=True),
    )
    assert discover(symbols, [TINY]) == (
        Found(tiny, ("TinyAliasForCausalLM",), new=False),
        Found(MTP, MTP.architectures, new=True),
    )
    assert discover(symbols, [tiny, MTP]) == ()
    assert discover(symbols, [TINY], "TinyForCausalLM") == (Found(TINY, (), new=False),)


def test_a_family_that_is_taken_gets_a_longer_name(symbols: Symbols) -> None:
    other = TINY.model_copy(update={"module": "vllm.models.tiny", "architectures": ("Other",)})
    assert [item.spec.family for item in discover(symbols, [other])] == ["models_tiny", "tiny_mtp"]


def test_specs_are_written_once_and_load_as_what_was_found(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run()
    assert code == 0
    assert shown.splitlines()[0].strip() == "vLLM 9.9.9, cpu"
    assert rows(shown) == [
        ["tiny", "TinyDecoderLayer", "proved", "TinyForCausalLM, TinyAliasForCausalLM", "wrote tiny.toml"],
        ["tiny_mtp", "TinyDecoderLayer", "proved", "TinyMTPModel, TinyMTP2Model", "wrote tiny_mtp.toml"],
    ]
    assert load_spec(str(tmp_path / "specs" / "tiny_mtp.toml")) == MTP
    assert run()[:2] == (0, f"nothing to write: {tmp_path / 'specs'} covers what vLLM 9.9.9 has for cpu\n")


def test_an_existing_spec_is_never_overwritten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "specs" / "tiny.toml"
    path.parent.mkdir()
    text = f'# ours\nfamily = "tiny"\nmodule = "{MODELS}.tiny"\narchitectures = ["TinyForCausalLM"]\n'
    path.write_text(text)
    code, shown, _ = run("TinyAliasForCausalLM")
    assert (code, rows(shown)) == (
        0,
        [["tiny", "TinyDecoderLayer", "proved", "TinyAliasForCausalLM", "add to tiny.toml"]],
    )
    code, shown, _ = run("TinyForCausalLM")
    assert (code, rows(shown)) == (0, [["tiny", "TinyDecoderLayer", "proved", "TinyForCausalLM", "has tiny.toml"]])
    assert [each.name for each in path.parent.iterdir()] == ["tiny.toml"]
    path.write_text(text.replace('"tiny"', '"small"').replace(".tiny", ".small"))
    assert run() == (2, "", f"error: {path} is there and holds another family\n  do: give it its family's name\n")


def test_a_refused_layer_has_its_spec_and_its_reason(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("TinyMTPModel", edits=(LOOP,))
    assert code == 3
    assert rows(shown) == [["tiny_mtp", "TinyDecoderLayer", "refused: no-form", "TinyMTPModel", "wrote tiny_mtp.toml"]]
    assert shown.splitlines()[-3:] == [
        "refused tiny_mtp",
        "vllm/model_executor/models/tiny.py:72: forward: FFN work inside a `For` statement [no-form]",
        "  do: serve this family unsplit: the FFN's work must stand in assignments of its own, outside loops",
    ]
    assert load_spec(str(tmp_path / "specs" / "tiny_mtp.toml")).architectures == ("TinyMTPModel",)
    assert run(edits=(LOOP,))[0] == 0


def test_json_lists_layers_and_the_specs_that_were_written(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("TinyMTPModel", "--json")
    document = json.loads(shown)
    (layer,) = document["layers"]
    assert (code, layer["spec"], layer["verdict"]) == (0, "tiny_mtp", "proved")
    assert [file["path"] for file in document["files"]] == ["tiny_mtp.toml"]
    assert (tmp_path / "specs" / "tiny_mtp.toml").is_file()


REFUSED = {
    "TinyForCausal": (
        "vllm/model_executor/models/registry.py:1: TinyForCausal: "
        "the model registry of vLLM 9.9.9 has no such architecture [architecture-missing]\n"
        "  do: name one of it: TinyForCausalLM, TinyAliasForCausalLM, PlainForCausalLM\n"
    ),
    "Xyzzy": (
        "vllm/model_executor/models/registry.py:1: Xyzzy: "
        "the model registry of vLLM 9.9.9 has no such architecture [architecture-missing]\n"
        "  do: name one of it, as a model's config.json does\n"
    ),
    "PlainForCausalLM": (
        "vllm/model_executor/models/plain.py:4: PlainForCausalLM: "
        "PlainForCausalLM builds no mixture of experts [no-experts]\n"
        "  do: serve it unsplit: there is nothing for an FFN role to do\n"
    ),
    "GoneForCausalLM": (
        "vllm/model_executor/models/gone.py:1: GoneForCausalLM: "
        "vllm.model_executor.models.gone.GoneForCausalLM is not in the source for cpu [no-experts]\n"
        "  do: choose another platform\n"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_be_covered(run: Run, tmp_path: Path, name: str) -> None:
    assert run(name) == (3, "", f"refused {name}\n{REFUSED[name]}")
    assert not (tmp_path / "specs").exists()


@pytest.mark.parametrize("option", ["--all", "--check", "--diff", "--table", "--list", "Two"])
def test_it_takes_one_architecture_and_no_other_mode(run: Run, option: str) -> None:
    text = "error: --discover takes one architecture or none, and of the other modes --json alone\n"
    assert run("One", option) == (2, "", text)
