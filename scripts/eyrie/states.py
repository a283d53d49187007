"""Which hidden states are meant: the recipe under which the store keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.config import HiddenStatesSettings


def states_recipe(
    target: Mapping[str, Any], settings: HiddenStatesSettings, compute_dtype: str
) -> dict[str, Any]:
    """What the numbers of stored hidden states depend on; `target` is what target.json holds."""
    return {
        "target_revision": target["revision"],
        "layer_ids": settings.layer_ids or target["layer_ids_default"],
        "dtype": settings.dtype,
        "compute_dtype": compute_dtype,
    }
