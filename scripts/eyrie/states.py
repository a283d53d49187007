"""Which hidden states are meant: the recipe under which the store keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.config import HiddenStatesSettings


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
        "layer_ids": settings.layer_ids or target["layer_ids_default"],
        "dtype": settings.dtype,
        "compute_dtype": compute_dtype,
        **({} if draft_vocabulary is None else top),
    }
