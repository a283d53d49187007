"""Which hidden states are meant: the recipe under which the store keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.config import ConfigError, HiddenStatesSettings, config_line


def default_layer_ids(layers: int) -> list[int]:
    """The layers EAGLE-3 taps by default, [2, n//2, n-3], as indices into Hugging Face's `hidden_states`.

    Raises ConfigError for a target that has too few layers for three different ones.
    """
    ids = [2, layers // 2, layers - 3]
    if ids != sorted(set(ids)):
        raise ConfigError(
            f"{config_line(['hidden_states', 'layer_ids'])}: the target has {layers} layers, and the default "
            f"would name {ids}\n  expected: three different layers in rising order\n"
            f"  change: hidden_states.layer_ids, to three of 0 to {layers - 1}"
        )
    return ids


def states_recipe(
    target: Mapping[str, Any], settings: HiddenStatesSettings, compute_dtype: str
) -> dict[str, Any]:
    """What the numbers of stored hidden states depend on; `target` is what target.json holds."""
    return {
        "target_revision": target["revision"],
        "layer_ids": settings.layer_ids or default_layer_ids(target["layers"]),
        "dtype": settings.dtype,
        "compute_dtype": compute_dtype,
    }
