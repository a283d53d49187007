"""Which hidden states are meant: the recipe under which the store keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
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


def wanted_layer_ids(settings: HiddenStatesSettings, layers: int) -> list[int]:
    """The layers to capture of a target with so many. Raises ConfigError as default_layer_ids does."""
    return settings.layer_ids or default_layer_ids(layers)


def states_recipe(
    target: Mapping[str, Any],
    settings: HiddenStatesSettings,
    compute_dtype: str,
    draft_vocabulary: str | None = None,
) -> dict[str, Any]:
    """What the numbers of stored hidden states depend on; `target` is what target.json holds.

    draft_vocabulary: the digest of the vocabulary whose top tokens are stored; None where the last state is,
    as an answering pass leaves it, which comes before any vocabulary.
    """
    top = {"top_tokens": settings.top_tokens, "draft_vocabulary": draft_vocabulary}
    return {
        "target_revision": target["revision"],
        "layer_ids": wanted_layer_ids(settings, target["layers"]),
        "dtype": settings.dtype,
        "compute_dtype": compute_dtype,
        **({} if draft_vocabulary is None else top),
    }


def served_layer_ids(layer_ids: Sequence[int], layers: int) -> list[int]:
    """What a server is to leave: the wanted layers and what proves them.

    First 0, the embedding, and last the number of layers: the state before the final norm.
    """
    return [*([] if 0 in layer_ids else [0]), *layer_ids, layers]


def command_values(settings: HiddenStatesSettings, target_path: Path, arriving: Path) -> dict[str, str]:
    """What {states} and {layer_ids} in a server's command stand for; arriving: the folder of its files.

    The target's number of layers is read from its config.json alone. Raises ConfigError.
    """
    try:
        config = json.loads((target_path / "config.json").read_text(encoding="utf-8"))
        layers = int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"target.path: expected {target_path}/config.json with num_hidden_layers, but: {error!r}"
        ) from error
    ids = served_layer_ids(wanted_layer_ids(settings, layers), layers)
    return {"states": str(arriving.resolve()), "layer_ids": json.dumps(ids)}
