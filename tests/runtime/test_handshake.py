import pytest

from afd_runtime.config import Role
from afd_runtime.errors import HandshakeError
from afd_runtime.handshake import Facts, check_facts, model_hash

ATTENTION: Facts = {"dtype": "torch.bfloat16", "hidden size": 128, "split layers": [0, 1], "sequence parallel": False}


def refusal(mine: Facts, theirs: Facts, role: Role) -> str:
    with pytest.raises(HandshakeError) as error:
        check_facts(mine, theirs, role)
    return str(error.value)


def test_equal_facts_pass() -> None:
    check_facts(ATTENTION, dict(ATTENTION), "attention")
    check_facts(ATTENTION, dict(ATTENTION), "ffn")


def test_both_sides_name_every_field_and_both_values() -> None:
    ffn = {**ATTENTION, "dtype": "torch.float16", "split layers": [0, 1, 2]}
    text = (
        "the attention and the ffn role do not fit together:\n"
        "  dtype: attention has torch.bfloat16, ffn has torch.float16\n"
        "  split layers: attention has [0, 1], ffn has [0, 1, 2]"
    )
    assert refusal(ATTENTION, ffn, "attention") == text
    assert refusal(ffn, ATTENTION, "ffn") == text


def test_a_field_that_one_side_lacks() -> None:
    ffn = {field: value for field, value in ATTENTION.items() if field != "sequence parallel"}
    text = (
        "the attention and the ffn role do not fit together:\n  sequence parallel: attention has False, ffn has nothing"
    )
    assert refusal(ATTENTION, ffn, "attention") == text
    assert refusal(ffn, ATTENTION, "ffn") == text


def test_a_model_is_the_same_in_another_folder_and_under_an_alias() -> None:
    here = {"architectures": ["X"], "_name_or_path": "/a", "hidden_size": 128}
    there = {"hidden_size": 128, "architectures": ["AFDFFNX"], "_name_or_path": "/b"}
    assert model_hash(here) == model_hash(there)
    assert model_hash(here) != model_hash({**here, "hidden_size": 256})


def test_names_within_a_configuration_are_not_the_model() -> None:
    """A role may have renamed the architecture of a model within the one that is served."""
    one, other = ({"text_config": {"architectures": [name], "size": 1}} for name in ("Native", "AFDFFNNative"))
    assert model_hash(one) == model_hash(other)
    assert model_hash(one) != model_hash({"text_config": {"architectures": ["Native"], "size": 2}})
