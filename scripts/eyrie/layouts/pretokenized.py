"""Rows that others have tokenized: token ids and which of them are supervised.

    {"input_ids": [1, 319, 13563, 2], "loss_mask": [0, 0, 1, 1]}
    {"input_ids": [1, 319, 13563, 2], "labels": [-100, -100, 13563, 2]}

One of the two must say what is supervised; nothing is guessed. Whether the ids are the target's cannot be
seen here: the stage that knows the target compares them with its vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, SkipRow, Tokens, list_column, optional_column

COLUMNS = ("input_ids",)
OPTIONAL = ("loss_mask", "labels")
EXPECTED = (
    "columns `input_ids` and `loss_mask` (or `labels` with -100) with lists of whole numbers of one length"
)

# What trainers put where a token is not supervised.
_IGNORED = -100


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The row's tokens and mask, as they are."""
    ids_name, mask_name, labels_name = (fields.get(name, name) for name in (*COLUMNS, *OPTIONAL))
    ids = _numbers(row, ids_name)
    if ids and min(ids) < 0:
        raise SkipRow(f"bad_type:{ids_name}")
    if optional_column(row, mask_name) is not None or optional_column(row, labels_name) is None:
        mask = _numbers(row, mask_name, bools=True)
        name, fits = mask_name, set(mask) <= {0, 1}
    else:
        labels = _numbers(row, labels_name)
        mask = [int(label != _IGNORED) for label in labels]
        name, fits = (
            labels_name,
            all(label in (_IGNORED, one) for label, one in zip(labels, ids, strict=False)),
        )
    if len(mask) != len(ids):
        raise SkipRow(f"length_mismatch:{name}")
    if not fits:
        raise SkipRow(f"bad_type:{name}")
    if not any(mask):
        raise SkipRow("no_supervised_text")
    return Conversation([], tokens=Tokens(ids, mask))


def _numbers(row: Any, name: str, bools: bool = False) -> list[int]:
    values = list_column(row, name)
    kinds = (int, bool) if bools else (int,)
    if not all(type(value) in kinds for value in values):
        raise SkipRow(f"bad_type:{name}")
    return [int(value) for value in values]
