"""Which code files a cheap stage's result depends on: its script and, transitively, what that imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from eyrie.records import content_key, sha256_file

SCRIPTS = Path("scripts")

# These only check and talk. A setting's value reaches a stage as a parameter, with defaults filled in, so a
# change of config.py that matters is seen there; words on a terminal are no part of a result.
_WITHOUT_EFFECT = frozenset({"eyrie.config", "eyrie.console", "eyrie.errors"})


def code_files(script: str, layout: str | None = None) -> list[str]:
    """The files of `scripts/SCRIPT.py` and the Eyrie modules it imports, and those of its dataset's layout.

    Layouts are loaded by name, so that a dataset depends on its own layout and on no other.
    """
    return sorted(str(path) for path in _files(SCRIPTS, script, layout))


def code_digest(script: str, layout: str | None = None) -> str:
    """One digest of the content of those files, in the folder of the code that runs, wherever it is run."""
    scripts = Path(__file__).resolve().parent.parent
    files = sorted(_files(scripts, script, layout))
    return content_key([[str(path.relative_to(scripts)), sha256_file(path)] for path in files])


def _files(scripts: Path, script: str, layout: str | None) -> set[Path]:
    found = set(_closure(scripts, scripts / f"{script}.py"))
    if layout is not None:
        found.update(_closure(scripts, _module_file(scripts, f"eyrie.layouts.{layout}")))
    return found


@cache
def _closure(scripts: Path, start: Path) -> frozenset[Path]:
    """The file itself and all files of this project that it imports."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        waiting.extend(
            _module_file(scripts, module)
            for module in _imported_modules(path)
            if module not in _WITHOUT_EFFECT
        )
    return frozenset(found)


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("eyrie"))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eyrie"):
            yield node.module
            # `from eyrie import records` and `from eyrie.eagle3 import model` import modules, too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_file(scripts: Path, module: str) -> Path:
    path = scripts.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
