"""Messages whose assistant speaks on channels: analysis, commentary and final (gpt-oss).

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant_analysis", "content": "Easy."},
                  {"role": "assistant_final", "content": "4"}]}

The channel stands in the role's name or under `channel`. What is said on analysis is the reasoning of the
turn that follows it. A `thinking` entry is reasoning as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    declared_tools,
    entry,
    message,
    optional_column,
    refuse_media,
    turns_column,
)

COLUMNS = ("messages",)
OPTIONAL = ("conversations", "tools")
EXPECTED = "a column `messages` (or `conversations`) with {role, content}, the roles with channels"

_CHANNELS = ("analysis", "commentary", "final")


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The row's messages, with reasoning in the turns that it led to."""
    refuse_media(row)
    name = fields.get("messages", "messages")
    other = fields.get("conversations", "conversations")
    if optional_column(row, name) is None and optional_column(row, other) is not None:
        name = other
    tools, notes = declared_tools(optional_column(row, fields.get("tools", "tools")))
    return Conversation(_joined(turns_column(row, name)), tools, notes=notes)


def _joined(turns: Iterable[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    reasoning = ""
    for turn in turns:
        role, channel = _role_and_channel(turn)
        made = message(role, turn.get("content"), turn)
        if channel == "analysis":
            reasoning += made["content"]
            continue
        if reasoning and made["role"] != "assistant":
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
        elif reasoning:
            made["reasoning_content"] = reasoning + made.get("reasoning_content", "")
        reasoning = ""
        messages.append(made)
    if reasoning:
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    return messages


def _role_and_channel(turn: Mapping[str, Any]) -> tuple[Any, str]:
    role = entry(turn, "role")
    for channel in _CHANNELS:
        if role == f"assistant_{channel}":
            return "assistant", channel
    named = turn.get("channel")
    return role, named if role == "assistant" and isinstance(named, str) else ""
