"""The draft vocabulary: the target's tokens that the drafter can propose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyrie.config import ConfigError, config_line
from eyrie.gates import GateError
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


def check_coverage(share: float | None, least: float | None) -> None:
    """Stop the build where the vocabulary holds too small a share of the validation rows' supervised tokens.

    share: None where there is no such token. least: None asks for nothing. Raises GateError.
    """
    if share is None or least is None or share >= least:
        return
    raise GateError(
        f"the draft vocabulary holds {share:.1%} of the supervised tokens of the validation rows\n"
        f"  expected: at least {least:.1%}; a token it lacks is never accepted\n"
        f"  change: a larger {config_line(['drafter', 'draft_vocab_size'])}, more samples, a vocabulary "
        f"that was chosen for these rows, or {config_line(['drafter', 'min_coverage'])}"
    )


def pinned_tokens(path: Path, vocab_size: int, size: int) -> Counts:
    """The draft tokens of a vocabulary.json, or of a checkpoint's model.safetensors, as they are.

    Raises ConfigError where they are not `size` tokens, and RecordError where they are not rising ids of the
    target.
    """
    ids = _checkpoint_tokens(path, vocab_size) if path.suffix == ".safetensors" else None
    tokens = read_vocabulary(path, vocab_size) if ids is None else ids
    if len(tokens) != size:
        raise ConfigError(
            f"drafter.vocabulary: {path} holds {len(tokens)} tokens, but drafter.draft_vocab_size is {size}. "
            f"Set drafter.draft_vocab_size: {len(tokens)}"
        )
    return np.asarray(tokens, dtype=np.int64)


def _checkpoint_tokens(path: Path, vocab_size: int) -> list[int]:
    # A checkpoint's floats are bfloat16, which numpy does not know: only the one tensor is read.
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only a pinned vocabulary needs it

    try:
        with safe_open(path, framework="np") as file:
            d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    except (SafetensorError, OSError) as error:
        raise RecordError(f"{path}: expected a drafter with the maps d2t and t2d, but: {error}") from error
    if len(t2d) != vocab_size:
        raise RecordError(f"{path}: a drafter for {len(t2d)} tokens, but the target has {vocab_size}")
    return _checked_ids(d2t + np.arange(len(d2t)), vocab_size, path)


def read_vocabulary(path: Path, vocab_size: int) -> list[int]:
    """The token ids of a vocabulary.json. Raises RecordError where they are not rising ids of the target."""
    data = read_json(path)
    ids = np.asarray(data["token_ids"], dtype=np.int64)
    if data["vocab_size"] != vocab_size:
        raise RecordError(
            f"{path}: made for {data['vocab_size']} tokens, but the target has {vocab_size}. Build it anew."
        )
    return _checked_ids(ids, vocab_size, path)


def _checked_ids(ids: Counts, vocab_size: int, path: Path) -> list[int]:
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise RecordError(
            f"{path}: expected token_ids to be rising, different ids below {vocab_size}. Build it anew."
        )
    return ids.tolist()
