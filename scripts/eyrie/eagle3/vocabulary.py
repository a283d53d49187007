"""The draft vocabulary: the target's tokens that the drafter can propose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyrie.config import ConfigError
from eyrie.records import RecordError, read_json

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Frequencies:
    """How often each token id [vocab_size] occurs in a split: supervised, and elsewhere (in prompts)."""

    supervised: Counts
    elsewhere: Counts


def count_tokens(rows: Iterable[Mapping[str, Any]], vocab_size: int) -> dict[str, Frequencies]:
    """The frequencies of each split.

    rows: tokenized rows with split, input_ids and loss_mask. Raises RecordError for an id outside the
    vocabulary.
    """
    counts: dict[str, Frequencies] = {}
    for row in rows:
        ids = np.asarray(row["input_ids"], dtype=np.int64)
        mask = np.asarray(row["loss_mask"], dtype=bool)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise RecordError(
                f"row {row['id']}: token ids from {ids.min()} to {ids.max()}; expected ids from 0 to "
                f"{vocab_size - 1}, the target's vocabulary. Was it tokenized for another target?"
            )
        nothing = [np.zeros(vocab_size, dtype=np.int64) for _ in range(2)]
        split = counts.setdefault(row["split"], Frequencies(*nothing))
        np.add.at(split.supervised, ids[mask], 1)
        np.add.at(split.elsewhere, ids[~mask], 1)
    return counts


def choose_tokens(counts: Frequencies, size: int) -> Counts:
    """The `size` ids supervised most often, rising; of equally frequent ones the lowest ids.

    Fewer different tokens than `size`: those that prompts hold most often come next, since answers take up
    what they were asked about; then the lowest unused ids. Raises ConfigError for a size beyond the
    vocabulary.
    """
    if size > len(counts.supervised):
        raise ConfigError(
            f"drafter.draft_vocab_size: saw {size}; expected at most {len(counts.supervised)}, the target's "
            "vocabulary"
        )
    elsewhere = np.where(counts.supervised > 0, 0, counts.elsewhere)
    # The last key counts first, and equals keep their order.
    by_frequency = np.lexsort((-elsewhere, -counts.supervised))
    return np.sort(by_frequency[:size]).astype(np.int64)


def coverage(counts: Counts | None, token_ids: Counts) -> float | None:
    """The share of supervised tokens that the vocabulary holds; None where there is none to cover."""
    total = 0 if counts is None else int(counts.sum())
    return int(counts[token_ids].sum()) / total if counts is not None and total else None


def read_vocabulary(path: Path, vocab_size: int) -> list[int]:
    """The token ids of a vocabulary.json. Raises RecordError where they are not rising ids of the target."""
    data = read_json(path)
    ids = np.asarray(data["token_ids"], dtype=np.int64)
    if data["vocab_size"] != vocab_size:
        raise RecordError(
            f"{path}: made for {data['vocab_size']} tokens, but the target has {vocab_size}. Build it anew."
        )
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise RecordError(
            f"{path}: expected token_ids to be rising, different ids below {vocab_size}. Build it anew."
        )
    return ids.tolist()
