"""Turns of both kinds in one list, as sources that were put together have them.

    {"conversations": [{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Hello"}]}

Each turn is read by the keys that it fills: a table writer may have put null under the others. The list may
also be called `messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    declared_tools,
    entry,
    message,
    optional_column,
    refuse_media,
    system_turn,
    turns_column,
)

COLUMNS = ("conversations",)
OPTIONAL = ("messages", "system", "tools")
EXPECTED = "a column `conversations` (or `messages`) with a list of {from, value} and {role, content}"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The row's turns, a system column before them."""
    refuse_media(row)
    name = fields.get("conversations", "conversations")
    other = fields.get("messages", "messages")
    if optional_column(row, name) is None and optional_column(row, other) is not None:
        name = other
    messages = [_message(turn) for turn in turns_column(row, name)]
    system = system_turn(row, fields.get("system", "system"))
    tools, notes = declared_tools(optional_column(row, fields.get("tools", "tools")))
    return Conversation(system + messages if messages else [], tools, notes=notes)


def _message(turn: Mapping[str, Any]) -> Message:
    if turn.get("from") is not None and turn.get("role") is None:
        return message(turn["from"], entry(turn, "value"), turn)
    return message(entry(turn, "role"), turn.get("content"), turn)
