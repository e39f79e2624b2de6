"""The settings under `additional_config["afd"]`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afd_runtime.errors import AFDConfigError

Role = Literal["attention", "ffn"]

CONNECTORS = {
    "GlooAFDConnector": "afd_runtime.connectors.gloo:GlooConnector",
    "P2pNcclAFDConnector": None,
    "SymmMemAFDConnector": None,
    "CAMP2pAFDConnector": None,
    "CAMAsyncAFDConnector": None,
}
"""Connector names to "module:class"; None marks a known name that this release does not implement."""


class ConnectorOptions(BaseModel):
    """`connector_extra_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one hop within a step may take."""
    connect_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that Attention waits for the FFN to come up, or to become free."""


class AFDConfig(BaseModel):
    """One role's settings. Both roles must agree on all but `role`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Role
    connector: str = "GlooAFDConnector"
    host: str = "127.0.0.1"
    """Address of the FFN role: it listens there, Attention connects there."""
    port: int = Field(default=1239, ge=1, le=65535)
    num_attention_ranks: int = Field(default=1, ge=1)
    num_ffn_ranks: int = Field(default=1, ge=1)
    compute_gate_on_attention: bool = False
    connector_extra_config: ConnectorOptions = ConnectorOptions()


FIXES = {
    "role": 'set it to "attention" or "ffn"',
    "connector": f"set it to one of {', '.join(CONNECTORS)}",
    "host": "set it to the address of the FFN role, as text",
    "port": "set it to a free port between 1 and 65535",
    "num_attention_ranks": "set it to 1",
    "num_ffn_ranks": "set it to 1",
    "compute_gate_on_attention": "set it to false",
    "connector_extra_config": 'set it to an object such as {"timeout_s": 60}',
    "connector_extra_config.timeout_s": "set it to a number of seconds above 0",
    "connector_extra_config.connect_timeout_s": "set it to a number of seconds above 0",
}


def parse_config(raw: object) -> AFDConfig:
    """Raise `AFDConfigError` with one line for each wrong field."""
    if not isinstance(raw, dict):
        raise AFDConfigError(f'afd: saw {raw!r}; set it to an object such as {{"role": "attention"}}')
    try:
        config = AFDConfig.model_validate(raw)
    except ValidationError as error:
        raise AFDConfigError("\n".join(_line(entry) for entry in error.errors())) from None
    _refuse_unsupported(config)
    return config


def _line(entry: Any) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        model: type[BaseModel] = ConnectorOptions if len(entry["loc"]) > 1 else AFDConfig
        return f"afd.{path}: unknown field; known are {', '.join(model.model_fields)}"
    if entry["type"] == "missing":
        return f"afd.{path}: missing; {FIXES[path]}"
    return f"afd.{path}: saw {entry['input']!r}; {FIXES[path]}"


def _refuse_unsupported(config: AFDConfig) -> None:
    if config.connector not in CONNECTORS:
        raise AFDConfigError(f"afd.connector: saw {config.connector!r}; {FIXES['connector']}")
    if CONNECTORS[config.connector] is None:
        usable = ", ".join(name for name, target in CONNECTORS.items() if target is not None)
        raise AFDConfigError(f"afd.connector: {config.connector} is not implemented yet; set it to {usable}")
    for field in ("num_attention_ranks", "num_ffn_ranks"):
        if (ranks := getattr(config, field)) != 1:
            raise AFDConfigError(
                f"afd.{field}: saw {ranks}, but only one rank of each role is supported yet; set it to 1"
            )
    if config.compute_gate_on_attention:
        raise AFDConfigError(
            "afd.compute_gate_on_attention: saw True, but the gate runs on the FFN role only for now; set it to false"
        )


UNSUPPORTED = (
    ("parallel_config.tensor_parallel_size", 1, "--tensor-parallel-size"),
    ("parallel_config.pipeline_parallel_size", 1, "--pipeline-parallel-size"),
    ("parallel_config.data_parallel_size", 1, "--data-parallel-size"),
    ("parallel_config.enable_dbo", False, "--enable-dbo"),
    ("parallel_config.enable_eplb", False, "--enable-eplb"),
    ("speculative_config", None, "--speculative-config"),
    ("lora_config", None, "--enable-lora"),
)
"""vLLM settings that a split model cannot serve yet: where, the only value served, the flag that sets it."""


def refuse_unsupported_vllm(vllm_config: Any) -> None:
    """Raise `AFDConfigError` for a vLLM feature that would be silently wrong or hang when split."""
    for path, served, flag in UNSUPPORTED:
        value = vllm_config
        for name in path.split("."):
            value = getattr(value, name, served)
        if value != served:
            seen = f"saw {value!r}" if isinstance(value, int) else "it is set"
            raise AFDConfigError(f"afd: {path}: {seen}, which AFD does not support yet; start without {flag}")
