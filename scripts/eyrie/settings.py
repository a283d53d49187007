"""What all settings share: the model they are, its checks in words, and the line of a key in its file."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyrie.errors import BuildError

CONFIG_FILES_VARIABLE = "EYRIE_CONFIG_FILES"

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0.0)]


class ConfigError(BuildError):
    """A mistake in the configuration, in words: which key, what was seen, what was expected."""


class Settings(BaseModel):
    """A part of the configuration: unknown keys are refused, values are never changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


SettingsType = TypeVar("SettingsType", bound=Settings)


def parse_settings(model: type[SettingsType], text: str) -> SettingsType:
    """A stage's settings from the JSON text of `--settings`. Raises ConfigError."""
    return parse(model, json.loads(text))


def parse(model: type[SettingsType], data: object) -> SettingsType:
    """The settings from their data. Raises ConfigError, one line a mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_in_words(model, dict(mistake)) for mistake in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _in_words(model: type[BaseModel], mistake: dict[str, Any]) -> str:
    path = [str(part) for part in mistake["loc"]]
    where = config_line(path) if path else "the configuration"
    if mistake["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _known_keys(model, path[:-1]), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{where}: unknown key {path[-1]!r}{hint}"
    if mistake["type"] == "missing":
        return f"{where}: missing; it has no default"
    if mistake["type"] == "value_error" and not path:
        # A check across the whole configuration names the key itself.
        return str(mistake["ctx"]["error"])
    return f"{where}: saw {mistake['input']!r}; {mistake['msg']}"


def _known_keys(model: type[BaseModel], path: Iterable[str]) -> list[str]:
    """The keys of the model that a path leads to; mappings with free names count as one step."""
    fields = model.model_fields
    for part in path:
        field = fields.get(part)
        if field is None:
            continue
        arguments = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [a for a in arguments if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        fields = inner[0].model_fields
    return list(fields)


def config_line(path: Iterable[str], files: Iterable[Path] | None = None) -> str:
    """Names a key for an error message: `config.yaml:57 datasets.openthoughts.layout`.

    The files are those of the running build (Snakefile puts them into the environment, the last one wins);
    without them, or where the key is a default, the key alone is named. This is looked up when something
    failed and never before, so that moving a line in the file makes nothing stale.
    """
    parts = list(path)
    if files is None:
        files = [Path(name) for name in os.environ.get(CONFIG_FILES_VARIABLE, "").split(os.pathsep) if name]
    found = ""
    for file in files:
        line = _line_of(file, parts)
        if line is not None:
            found = f"{file}:{line} "
    return found + ".".join(parts)


def _line_of(file: Path, parts: list[str]) -> int | None:
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    line = None
    for part in parts:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        match = next((pair for pair in pairs if pair[0].value == part), None)
        if match is None:
            break
        line, node = match[0].start_mark.line + 1, match[1]
    return line
