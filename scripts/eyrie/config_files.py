"""The configuration in files, for commands that are run by hand and not by Snakemake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from eyrie.config import Config, ConfigError, parse_config


def read_config(files: Sequence[Path]) -> Config:
    """The configuration in these files, each laid over those before it as Snakemake does it."""
    merged: dict[str, Any] = {}
    for file in files:
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{file}: expected a configuration, but: {error}") from error
        merged = _laid_over(merged, data or {})
    return parse_config(merged)


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _laid_over(old, value)
        result[key] = value
    return result
