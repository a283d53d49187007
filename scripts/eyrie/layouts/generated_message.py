"""A conversation and, beside it, the answer that a model generated (completions of Infinity Instruct).

    {"conversation": [{"role": "user", "content": "Hi"}],
     "generated_message": {"role": "assistant", "content": "Hello"}}

The turns may lie one list deeper. The answer may be a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    checked_turns,
    entry,
    list_column,
    message,
    optional_column,
    refuse_media,
    system_turn,
)

COLUMNS = ("conversation",)
OPTIONAL = ("generated_message", "system")
EXPECTED = "a column `conversation` with a list of {role, content} and a column `generated_message`"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The turns, and the generated answer after them."""
    refuse_media(row)
    name = fields.get("conversation", "conversation")
    turns = list_column(row, name)
    if len(turns) == 1 and isinstance(turns[0], list):
        turns = turns[0]
    messages = [
        message(entry(turn, "role"), turn.get("content"), turn) for turn in checked_turns(turns, name)
    ]
    answer = optional_column(row, fields.get("generated_message", "generated_message"))
    if isinstance(answer, Mapping):
        messages.append(message(answer.get("role", "assistant"), answer.get("content"), answer))
    elif answer is not None:
        messages.append(message("assistant", answer))
    return Conversation(system_turn(row, fields.get("system", "system")) + messages if messages else [])
