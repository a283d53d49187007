"""The configuration in files, for commands that are run by hand and not by Snakemake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from eyrie.config import Config, ConfigError, parse_config

_DEFAULT = Path("config.yaml")


def read_config_of(arguments: Sequence[str]) -> Config:
    """The configuration of a build that is started with these words: --configfile, and --config key=value."""
    files = [Path(value) for value in _values(arguments, ("--configfile", "--configfiles"))]
    pairs = (value.partition("=") for value in _values(arguments, ("--config", "-C")))
    return read_config(files or [_DEFAULT], {key: yaml.safe_load(value) for key, _, value in pairs})


def _values(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """What stands behind the last of these flags, up to the next flag."""
    found: list[str] = []
    taking = False
    for word in arguments:
        name, equals, value = word.partition("=")
        if name in flags and word.startswith("-"):
            taking, found = True, [value] if equals else []
        elif word.startswith("-"):
            taking = False
        elif taking:
            found.append(word)
    return found


def read_config(files: Sequence[Path], more: Mapping[str, Any] | None = None) -> Config:
    """The configuration in these files, each laid over those before it as Snakemake does it.

    more: keys that are laid over all of them.
    """
    merged: dict[str, Any] = {}
    for file in files:
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{file}: expected a configuration, but: {error}") from error
        merged = _laid_over(merged, data or {})
    return parse_config(_laid_over(merged, dict(more or {})))


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _laid_over(old, value)
        result[key] = value
    return result
