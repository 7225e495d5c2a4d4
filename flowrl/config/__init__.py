"""Configs: the schema, how files and overrides are put together, and what is built of them."""

from flowrl.config.compose import ConfigError
from flowrl.config.load import load_config, read_config
from flowrl.config.schema import Config

__all__ = ["Config", "ConfigError", "load_config", "read_config"]
