"""What every manifest records, so that a result can be traced to what it was made from."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eyrie import __version__
from eyrie.records import sha256_file

SCHEMA_VERSION = 1


def manifest_header(
    stage: str, recipe: Mapping[str, Any], parents: Iterable[Path], packages: Iterable[str] = ()
) -> dict[str, Any]:
    """The common head of a manifest: stage, recipe, digests of the parents, versions.

    It holds no time, host or path outside the build, so equal inputs give equal bytes.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": stage,
        "recipe": dict(recipe),
        "parents": {str(path): sha256_file(path) for path in sorted(parents)},
        "versions": {
            "eyrie": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in sorted(packages)},
        },
    }
