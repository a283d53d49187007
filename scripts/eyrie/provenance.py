"""What every manifest records, so that a result can be traced to what it was made from."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eyrie import __version__
from eyrie.records import sha256_file

SCHEMA_VERSION = 1
IMAGE_VARIABLE = "EYRIE_IMAGE"
"""Set by run_container.py: the digest of the image that a build runs in."""


def manifest_header(
    stage: str, recipe: Mapping[str, Any], parents: Iterable[Path], packages: Iterable[str] = ()
) -> dict[str, Any]:
    """The common head of a manifest: stage, recipe, digests of the parents, versions.

    It holds no time, host or path outside the build, so equal inputs give equal bytes. Within a container it
    names the image, which is no rule's parameter: another image makes nothing stale.
    """
    image = os.environ.get(IMAGE_VARIABLE)
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
        **({"image": image} if image else {}),
    }
