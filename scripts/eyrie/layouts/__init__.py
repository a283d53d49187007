"""The raw layouts by name. Each is a module of its own, so that a dataset depends on its own layout alone."""

from __future__ import annotations

import difflib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from eyrie.config import ConfigError

if TYPE_CHECKING:
    from eyrie.layouts.base import Layout


def load_layout(name: str) -> Layout:
    """The layout of that name. Raises ConfigError, which lists those there are."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    names = [other for other in names if other not in ("__init__", "base")]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"saw layout {name!r}, expected one of {', '.join(names)}{hint}")
    return cast("Layout", import_module(f"{__name__}.{name}"))
