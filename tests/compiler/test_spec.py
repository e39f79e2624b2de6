from pathlib import Path

import pytest

from afd_compiler.diagnostics import UsageError
from afd_compiler.spec import known_specs, load_spec

GOOD = 'family = "tiny"\nmodule = "vllm.model_executor.models.tiny"\narchitectures = ["TinyForCausalLM"]\n'


def test_every_checked_in_spec_loads_under_its_own_name() -> None:
    assert known_specs()
    assert [load_spec(name).family for name in known_specs()] == list(known_specs())


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_text(GOOD)
    assert load_spec(str(path)).architectures == ("TinyForCausalLM",)


BAD = {
    "an unknown key": (f"{GOOD}colour = 1\n", "  colour: Extra inputs are not permitted"),
    "a missing key": (GOOD.replace('family = "tiny"\n', ""), "  family: Field required"),
    "no architecture": (GOOD.replace('"TinyForCausalLM"', ""), "  architectures: Tuple should have at least 1 item"),
    "a module outside vLLM": (GOOD.replace("vllm.", "os."), "  module: String should match pattern"),
    "a wrong type": (GOOD.replace('"tiny"', "3", 1), "  family: Input should be a valid string"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_spec_names_the_field(tmp_path: Path, what: str) -> None:
    text, problem = BAD[what]
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_spec(str(path))
    head, first, *_, last = str(error.value).splitlines()
    assert head == f"{path}: not a model spec:"
    assert first.startswith(problem)
    assert last == "  do: see model_specs/ for examples"


def test_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("family = ")
    with pytest.raises(UsageError, match=r"bad\.toml: not TOML: Invalid value \(at end of document\)"):
        load_spec(str(path))


def test_a_missing_file_and_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load_spec(str(tmp_path / "none.toml"))
    assert str(error.value) == f"{tmp_path / 'none.toml'}: no such spec file"
    with pytest.raises(UsageError) as error:
        load_spec("nothing")
    known = ", ".join(known_specs())
    assert str(error.value) == f"no spec is named 'nothing'\n  do: give a path, or one of: {known}"
