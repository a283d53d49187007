"""Which rows train, which choose settings, which are reported: decided by group and by nothing else."""

from __future__ import annotations

from typing import Literal

from eyrie.config import SplitSettings
from eyrie.records import content_key

Share = Literal["train", "validation", "held_out"]


def share_of(dataset: str, group: str, settings: SplitSettings) -> Share:
    """The share of a group. It depends on the group alone, so new rows never move old ones."""
    position = int(content_key("split", settings.seed, dataset, group)[:12], 16) / 16**12
    if position < settings.held_out:
        return "held_out"
    if position < settings.held_out + settings.validation:
        return "validation"
    return "train"
