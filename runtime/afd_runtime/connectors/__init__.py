"""Connectors by name."""

from importlib import import_module

from afd_runtime.config import CONNECTORS, AFDConfig
from afd_runtime.connectors.base import Connector


def make_connector(config: AFDConfig) -> Connector:
    """The connector that the settings name; `parse_config` has refused names without an implementation."""
    target = CONNECTORS[config.connector]
    assert target is not None, config.connector
    module, name = target.split(":")
    connector: Connector = getattr(import_module(module), name)(config)
    return connector
