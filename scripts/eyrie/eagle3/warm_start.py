"""Starting a drafter from the weights of an earlier one of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from eyrie.config import ConfigError
from eyrie.eagle3.checkpoint import load_drafter
from eyrie.eagle3.model import Drafter

# What the weights mean nothing without; the rest of the shape is only written to the checkpoint.
_SAME = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "layer_ids",
)


@torch.no_grad()
def start_from(folder: Path, drafter: Drafter) -> None:
    """Give the drafter the weights of the checkpoint in the folder.

    Raises ConfigError where that one has another draft vocabulary, shape or captured layers, and RecordError
    where it can't be read.
    """
    other = load_drafter(folder, drafter.embedding, torch.float32)
    _check_vocabulary(folder, other.draft_token_ids().tolist(), drafter.draft_token_ids().tolist())
    differing = [
        f"  {name}: {getattr(other.config, name)} there, {getattr(drafter.config, name)} here"
        for name in _SAME
        if getattr(other.config, name) != getattr(drafter.config, name)
    ]
    if differing:
        raise ConfigError(
            f"training.warm_start: the drafter in {folder} has another shape than this build's:\n"
            + "\n".join(differing)
            + "\n  expected the same\n  change: drafter.* and hidden_states.layer_ids to that checkpoint's, "
            "or training.warm_start: null"
        )
    weights = dict(other.named_parameters())
    for name, parameter in drafter.named_parameters():
        parameter.copy_(weights[name])


def _check_vocabulary(folder: Path, theirs: Sequence[int], ours: Sequence[int]) -> None:
    """The same draft tokens in both: a row of the head is about one token and no other."""
    if theirs == ours:
        return
    here, there = len(set(ours) - set(theirs)), len(set(theirs) - set(ours))
    raise ConfigError(
        f"training.warm_start: the drafter in {folder} has another draft vocabulary: {here} of this build's "
        f"{len(ours)} tokens are not among its {len(theirs)}, and {there} of its tokens are not here\n"
        "  expected the same tokens: each row of its head is about one of them\n"
        f"  change: drafter.vocabulary: {folder} and drafter.draft_vocab_size: {len(theirs)}, which pin this "
        "build's vocabulary to that checkpoint's; or training.warm_start: null"
    )
