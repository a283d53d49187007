"""A question and its answer, and the exchanges before them.

    {"query": "And in German?", "response": "Guten Tag", "history": [["Translate: good day", "Goddag"]]}

The history comes first, so its first question is the conversation's first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    SkipRow,
    list_column,
    optional_column,
    refuse_media,
    system_turn,
    text_column,
)

COLUMNS = ("query",)
OPTIONAL = ("response", "history", "system")
EXPECTED = "a column `query` and perhaps `response` and `history`, a list of [question, answer]"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """History, question and answer as turns."""
    refuse_media(row)
    messages = [
        *system_turn(row, fields.get("system", "system")),
        *_history(row, fields.get("history", "history")),
        {"role": "user", "content": text_column(row, fields.get("query", "query"))},
    ]
    if answer := text_column(row, fields.get("response", "response"), required=False):
        messages.append({"role": "assistant", "content": answer})
    return Conversation(messages)


def _history(row: Any, name: str) -> list[Message]:
    messages: list[Message] = []
    if optional_column(row, name) is None:
        return messages
    for pair in list_column(row, name):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise SkipRow(f"bad_type:{name}")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages
