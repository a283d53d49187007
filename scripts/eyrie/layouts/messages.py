"""Messages of role and content: `messages`, or `conversations` where a source calls them so.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

The list may be JSON text, a row may be the bare list, and a content may be null or a list of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    checked_turns,
    declared_tools,
    entry,
    message,
    optional_column,
    refuse_media,
    turns_column,
)

COLUMNS = ("messages",)
OPTIONAL = ("conversations", "tools")
EXPECTED = "a column `messages` (or `conversations`) with a list of {role, content}"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The row's messages and tools."""
    refuse_media(row)
    turns = (
        checked_turns(row, "row") if isinstance(row, list) else turns_column(row, _name_of_list(row, fields))
    )
    tools, notes = declared_tools(optional_column(row, fields.get("tools", "tools")))
    # SWE-agent puts a worked example before the task and marks it.
    messages = [
        message(entry(turn, "role"), turn.get("content"), turn) for turn in turns if not turn.get("is_demo")
    ]
    return Conversation(messages, tools, notes=notes)


def _name_of_list(row: Any, fields: Mapping[str, str]) -> str:
    name = fields.get("messages", "messages")
    other = fields.get("conversations", "conversations")
    return (
        other
        if name == "messages" and isinstance(row, Mapping) and name not in row and other in row
        else name
    )
