"""Which rows train, which choose settings, which are reported: decided by group and by nothing else."""

from __future__ import annotations

from typing import Literal

from eyrie.config import SplitSettings
from eyrie.records import content_key

Share = Literal["train", "validation", "held_out"]


def position_of(purpose: str, seed: int, dataset: str, group: str) -> float:
    """Where in [0, 1) a group lies: a hash of it, another one for each purpose."""
    return int(content_key(purpose, seed, dataset, group)[:12], 16) / 16**12


def share_of(dataset: str, group: str, settings: SplitSettings) -> Share:
    """The share of a group. It depends on the group alone, so new rows never move old ones."""
    position = position_of("split", settings.seed, dataset, group)
    if position < settings.held_out:
        return "held_out"
    if position < settings.held_out + settings.validation:
        return "validation"
    return "train"
