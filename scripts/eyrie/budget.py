"""What hidden states take on the disk, computed before any are made."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyrie.config import HiddenStatesSettings
from eyrie.errors import BuildError
from eyrie.states import wanted_layer_ids

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
_ID, _SCALE, _LOG, _MASS = 4, 4, 2, 4


class DiskError(BuildError):
    """The disk is too small for what is about to be written; the message has both numbers."""


def bytes_per_token(
    settings: HiddenStatesSettings, hidden_size: int, layers: int = 3, draft_vocab_size: int | None = None
) -> int:
    """Bytes that one token takes in a shard: its id, its layers, and its last state or top tokens.

    A shard's header, about 100 bytes a sample, is not counted. draft_vocab_size: of the vocabulary whose
    likeliest tokens are kept; it may be smaller than their number.
    """
    size = _BYTES[settings.dtype]
    layer_bytes = hidden_size * size + (_SCALE if settings.dtype == "float8" else 0)
    if settings.top_tokens is None:
        target = hidden_size * _BYTES[settings.computed_dtype]
    else:
        kept = min(settings.top_tokens, draft_vocab_size or settings.top_tokens)
        target = kept * (_ID + _LOG) + _MASS + _ID
    return _ID + layers * layer_bytes + target


def shape_of(target: Mapping[str, Any], settings: HiddenStatesSettings) -> tuple[int, int]:
    """Hidden size and number of captured layers of a target, by what target.json holds."""
    return target["hidden_size"], len(wanted_layer_ids(settings, target["layers"]))


def check_disk(store: Path, tokens: int, each: int, reserve: int, what: str, log: logging.Logger) -> None:
    """Refuse to begin what the disk can't hold; tell what it will take.

    tokens: to be stored, at most. each: bytes a token. reserve: bytes to leave free. what: names the tokens
    ("tokens of swe_agent"). Raises DiskError.
    """
    if not tokens:
        return
    needed, free = tokens * each, free_bytes(store)
    sizes = size_of(needed), size_of(free)
    log.info("%d %s to store, %d bytes each: %s of %s free", tokens, what, each, *sizes)
    if needed > free - reserve:
        raise DiskError(
            f"the hidden states of {tokens:,} {what} take {sizes[0]} ({each:,} bytes a token), but the "
            f"disk of {store} has {sizes[1]} free\n"
            f"  expected: at most {size_of(max(0, free - reserve))}, what is free less "
            f"hidden_states.disk_reserve ({size_of(reserve)})\n"
            "  change: free some (`make gc` lists what no result needs), move `work` to a larger disk, store "
            "less by hidden_states.dtype: float8 and hidden_states.top_tokens, or lower disk_reserve"
        )


def check_room_for_answers(
    store: Path,
    prompts: Sequence[int],
    longest: int,
    settings: HiddenStatesSettings,
    target: Mapping[str, Any],
    dataset: str,
    log: logging.Logger,
) -> None:
    """Refuse to begin where not even the prompts' states have room; warn where the longest answers' may not.

    prompts: their tokens. longest: tokens of the longest answer. Raises DiskError.
    """
    # As an answering pass leaves them: it comes before any vocabulary.
    left = settings.model_copy(update={"top_tokens": None})
    each, reserve = bytes_per_token(left, *shape_of(target, left)), settings.disk_reserve
    check_disk(store, sum(prompts) + len(prompts), each, reserve, f"tokens of {dataset} at least", log)
    most, free = (sum(prompts) + len(prompts) * longest) * each, free_bytes(store)
    if most > free - reserve:
        log.warning(
            "the states of %s may take up to %s, and %s are free: if answers are long the disk fills up "
            "before the end. What is stored by then is kept, and the same command goes on from there",
            *(dataset, size_of(most), size_of(free)),
        )


def nearest_there(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there already."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written where a folder lies, or will lie."""
    return shutil.disk_usage(nearest_there(folder)).free


def size_of(count: int) -> str:
    """A number of bytes for people, in powers of ten."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
