"""Python that a target's folder brings along: it runs only where the configuration says so.

A tokenizer may name classes of its own (`auto_map`), and loading it runs the files that hold them, with all
rights of the build. Nothing of it runs unless `target.trust_remote_code` is true; then it must be the very
files that target.json was made from. Code of another repository (`OWNER/NAME--module.Class`), which would be
fetched at that moment, never runs; for configurations and weights none does: see eyrie/target.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyrie.config import ConfigError
from eyrie.records import read_json, sha256_file

_FILES = ("config.json", "tokenizer_config.json")


def named_code(path: Path) -> dict[str, list[str]]:
    """The classes of its own that each file of a target's folder names, by the file's name."""
    found = {}
    for name in _FILES:
        settings = read_json(path / name) if (path / name).is_file() else {}
        classes = settings.get("auto_map") if isinstance(settings, dict) else None
        if classes:
            values = classes.values() if isinstance(classes, dict) else [classes]
            found[name] = sorted({one for value in values for one in _texts(value)})
    return found


def _texts(value: object) -> list[str]:
    """The names in one entry of an auto_map: a name, or a list in which some may be null."""
    if isinstance(value, str):
        return [value]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def check_tokenizer_code(path: Path, trusted: bool) -> None:
    """Refuse what would be fetched from elsewhere, trusted or not. Raises ConfigError."""
    elsewhere = [one for one in named_code(path).get(_FILES[1], []) if "--" in one]
    if trusted and elsewhere:
        raise ConfigError(
            f"{path}/{_FILES[1]} names code of another repository: {', '.join(elsewhere)}\n"
            "  expected: code in the target's own folder, which target.json can vouch for\n"
            f"  change: put the files beside it, and write their names without what stands before `--`"
        )


def refused(path: Path, name: str) -> ConfigError:
    """The error for a file of the target that can't be loaded without running code of its folder."""
    would_run = ", ".join(named_code(path).get(name, [])) or "code of its own"
    files = ", ".join(sorted(file.name for file in path.glob("*.py"))) or "none"
    return ConfigError(
        f"target.path: {path}/{name} can only be loaded by running Python that the target brings along: "
        f"{would_run} (Python files there: {files})\n"
        "  expected: a target that runs no code of its own, or one whose code was read and is trusted\n"
        "  change: read those files; then set target.trust_remote_code: true, and target.revision to the "
        "commit that they come from"
    )


def trusted_code(target: Mapping[str, Any], path: Path) -> bool:
    """Whether the Python in a target's folder may run, by what target.json holds.

    Raises ConfigError where it may, but is not what target.json was made from.
    """
    if not target.get("trust_remote_code", False):
        return False
    for file in sorted(path.glob("*.py")):
        if sha256_file(file) != target["files"].get(file.name):
            raise ConfigError(
                f"{file} is not the file that target.json was made from, and would be run\n"
                "  expected: the code that was trusted, to the byte\n"
                "  change: bring the file back, or read it and identify the target again"
            )
    return True
