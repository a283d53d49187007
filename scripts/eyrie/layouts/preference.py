"""Two answers to one prompt: the prompt is what both have in common.

    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [{"role": "user", ...}, ...]}
    {"conversations": [{"from": "human", ...}], "chosen": {"from": "gpt", ...}, "rejected": {...}}

Turns are of role and content or of from and value. An answer beside a prompt column may be one turn or text.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    column,
    entry,
    message,
    optional_column,
    refuse_media,
    turns_column,
)

COLUMNS = ("chosen", "rejected")
OPTIONAL = ("prompt", "conversations")
EXPECTED = (
    "columns `chosen` and `rejected` with lists of turns that begin alike, "
    "or a prompt (`prompt`, `conversations`) and two answers"
)


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The common prompt, and after it the chosen answer."""
    refuse_media(row)
    chosen, rejected = (_turns(row, fields.get(name, name), "assistant") for name in COLUMNS)
    for name in OPTIONAL:
        name = fields.get(name, name)
        if optional_column(row, name) is not None:
            prompt = _turns(row, name, "user")
            # Some rows repeat the prompt in both answers.
            return Conversation(chosen if chosen[: len(prompt)] == prompt else prompt + chosen)
    common = [
        one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    ]
    return Conversation(chosen if any(made["role"] == "user" for made in common) else common)


def _turns(row: Any, name: str, speaker: str) -> list[Message]:
    value = column(row, name)
    if isinstance(value, str) and not value.startswith("["):
        return [{"role": speaker, "content": value}]
    turns = [value] if isinstance(value, Mapping) else turns_column(row, name)
    return [_message(turn) for turn in turns]


def _message(turn: Mapping[str, Any]) -> Message:
    if "from" in turn:
        return message(turn["from"], entry(turn, "value"))
    return message(entry(turn, "role"), turn.get("content"), turn)
