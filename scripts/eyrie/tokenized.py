"""Tokenized samples: what the two stages that write tokenized_data.jsonl share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eyrie.chat import Chat
from eyrie.config import ConfigError, SplitSettings
from eyrie.records import RecordError, read_json, read_jsonl
from eyrie.remote_code import trusted_code
from eyrie.split import share_of


def read_chats(path: Path) -> list[dict[str, Any]]:
    """The rows of prompts.jsonl or conversations.jsonl, by id. Raises RecordError."""
    rows = list(read_jsonl(path))
    for row in rows:
        content = "input_ids" if "input_ids" in row else "messages"
        missing = [name for name in ("id", "group", content) if not row.get(name)]
        if missing:
            raise RecordError(
                f"{path}: a row (id {row.get('id')!r}) lacks {', '.join(missing)}; "
                "expected the rows that scripts/build_prompts.py writes"
            )
    return sorted(rows, key=lambda row: row["id"])


def open_target(path: Path, folder: Path) -> tuple[dict[str, Any], Chat]:
    """What target.json holds, and the chats of the target's folder.

    Raises ConfigError where the folder has another template by now, or code that is not the trusted one.
    """
    target: dict[str, Any] = read_json(path)
    chat = Chat(folder, trusted_code(target, folder))
    if target["template_sha256"] != chat.template_sha256:
        raise ConfigError(
            f"{path} tells of another chat template than the target's folder has; "
            "run scripts/identify_target.py again"
        )
    return target, chat


def sample_row(
    dataset: str,
    chat: Mapping[str, Any],
    ids: list[int],
    loss_mask: list[int],
    finish_reason: str,
    greedy: bool,
    split: SplitSettings,
) -> dict[str, Any]:
    """One row of tokenized_data.jsonl, made from a row of prompts or conversations.

    greedy: each supervised token is the one that the target found likeliest there.
    """
    return {
        "id": chat["id"],
        "dataset": dataset,
        "group": chat["group"],
        "split": share_of(dataset, chat["group"], split),
        "input_ids": ids,
        "loss_mask": loss_mask,
        "finish_reason": finish_reason,
        "greedy": greedy,
    }


_SHARES = ("train", "validation", "held_out")


class TokenCounts:
    """What a ledger says of the kept rows: rows, tokens and supervised tokens of each share."""

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._supervised: Counter[str] = Counter()

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row of tokenized_data.jsonl."""
        self._samples[row["split"]] += 1
        self._tokens[row["split"]] += len(row["input_ids"])
        self._supervised[row["split"]] += sum(row["loss_mask"])

    def as_dict(self) -> dict[str, Any]:
        """The counts as a ledger has them."""
        counts = {
            "samples": self._samples,
            "tokens": self._tokens,
            "supervised_tokens": self._supervised,
        }
        return {name: {share: count[share] for share in _SHARES} for name, count in counts.items()}


def count_tokens(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of rows that are all at hand."""
    counts = TokenCounts()
    for row in rows:
        counts.add(row)
    return counts.as_dict()
