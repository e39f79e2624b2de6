from types import SimpleNamespace
from typing import Any

import pytest

from afd_runtime.config import AFDConfig, parse_config, refuse_unsupported_vllm
from afd_runtime.errors import AFDConfigError

KNOWN = "GlooAFDConnector, P2pNcclAFDConnector, SymmMemAFDConnector, CAMP2pAFDConnector, CAMAsyncAFDConnector"
FIELDS = (
    "role, connector, host, port, num_attention_ranks, num_ffn_ranks, compute_gate_on_attention, connector_extra_config"
)


def test_the_launch_line_of_the_existing_plugin_is_understood() -> None:
    config = parse_config(
        {
            "role": "ffn",
            "connector": "GlooAFDConnector",
            "host": "127.0.0.1",
            "port": 1239,
            "num_attention_ranks": 1,
            "num_ffn_ranks": 1,
            "compute_gate_on_attention": False,
            "connector_extra_config": {"timeout_s": 5},
        }
    )
    assert config.role == "ffn"
    assert config.connector_extra_config.timeout_s == 5
    assert config == AFDConfig.model_validate(config.model_dump())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"role": None}, 'afd.role: saw None; set it to "attention" or "ffn"'),
        ({"role": "both"}, 'afd.role: saw \'both\'; set it to "attention" or "ffn"'),
        ({"rank": 3}, f"afd.rank: unknown field; known are {FIELDS}"),
        ({"port": 0}, "afd.port: saw 0; set it to a free port between 1 and 65535"),
        ({"port": "1239"}, "afd.port: saw '1239'; set it to a free port between 1 and 65535"),
        ({"host": 7}, "afd.host: saw 7; set it to the address of the FFN role, as text"),
        ({"connector": "Carrier"}, f"afd.connector: saw 'Carrier'; set it to one of {KNOWN}"),
        ({"num_ffn_ranks": 0}, "afd.num_ffn_ranks: saw 0; set it to 1"),
        (
            {"num_attention_ranks": 2},
            "afd.num_attention_ranks: saw 2, but only one rank of each role is supported yet; set it to 1",
        ),
        (
            {"compute_gate_on_attention": True},
            "afd.compute_gate_on_attention: saw True, but the gate runs on the FFN role only for now; set it to false",
        ),
        (
            {"connector_extra_config": {"timeout": 5}},
            "afd.connector_extra_config.timeout: unknown field; known are timeout_s, connect_timeout_s",
        ),
        (
            {"connector_extra_config": {"timeout_s": -1}},
            "afd.connector_extra_config.timeout_s: saw -1; set it to a number of seconds above 0",
        ),
        (
            {"role": "x", "port": 0},
            'afd.role: saw \'x\'; set it to "attention" or "ffn"\n'
            "afd.port: saw 0; set it to a free port between 1 and 65535",
        ),
    ],
)
def test_wrong_settings(change: dict[str, Any], text: str) -> None:
    with pytest.raises(AFDConfigError) as error:
        parse_config({"role": "attention", **change})
    assert str(error.value) == text


@pytest.mark.parametrize(
    "name", ["P2pNcclAFDConnector", "SymmMemAFDConnector", "CAMP2pAFDConnector", "CAMAsyncAFDConnector"]
)
def test_connectors_to_come_are_refused_by_name(name: str) -> None:
    with pytest.raises(AFDConfigError) as error:
        parse_config({"role": "attention", "connector": name})
    assert str(error.value) == f"afd.connector: {name} is not implemented yet; set it to GlooAFDConnector"


def test_a_missing_role() -> None:
    with pytest.raises(AFDConfigError) as error:
        parse_config({})
    assert str(error.value) == 'afd.role: missing; set it to "attention" or "ffn"'


def test_settings_that_are_no_object() -> None:
    with pytest.raises(AFDConfigError) as error:
        parse_config("ffn")
    assert str(error.value) == 'afd: saw \'ffn\'; set it to an object such as {"role": "attention"}'


def vllm_config(**parallel: object) -> SimpleNamespace:
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), speculative_config=None)


def test_what_vllm_can_be_started_with() -> None:
    refuse_unsupported_vllm(vllm_config(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1))


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("tensor_parallel_size", 2, "--tensor-parallel-size"),
        ("pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("data_parallel_size", 4, "--data-parallel-size"),
        ("enable_dbo", True, "--enable-dbo"),
        ("enable_eplb", True, "--enable-eplb"),
    ],
)
def test_parallel_modes_that_are_not_split_yet(field: str, value: int, flag: str) -> None:
    with pytest.raises(AFDConfigError) as error:
        refuse_unsupported_vllm(vllm_config(**{field: value}))
    assert str(error.value) == (
        f"afd: parallel_config.{field}: saw {value}, which AFD does not support yet; start without {flag}"
    )


@pytest.mark.parametrize(
    ("field", "flag"), [("speculative_config", "--speculative-config"), ("lora_config", "--enable-lora")]
)
def test_features_that_are_not_split_yet(field: str, flag: str) -> None:
    config = vllm_config()
    setattr(config, field, object())
    with pytest.raises(AFDConfigError) as error:
        refuse_unsupported_vllm(config)
    assert str(error.value) == f"afd: {field}: it is set, which AFD does not support yet; start without {flag}"
