"""Conversations of from and value, with either vocabulary of roles, and a system text beside them.

    {"system": "Be brief",
     "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

`from` says user/assistant as often as human/gpt, even between releases of one dataset; function_call and
observation turns are the assistant's calls and their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    declared_tools,
    entry,
    message,
    optional_column,
    refuse_media,
    text_column,
    turns_column,
)

COLUMNS = ("conversations",)
OPTIONAL = ("system", "tools")
EXPECTED = "a column `conversations` with a list of {from, value}"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The row's turns; a system column becomes the first turn, which the prompt rule may leave out."""
    refuse_media(row)
    turns = turns_column(row, fields.get("conversations", "conversations"))
    messages = [message(entry(turn, "from"), entry(turn, "value")) for turn in turns]
    system = text_column(row, fields.get("system", "system"), required=False)
    if messages and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    tools, notes = declared_tools(optional_column(row, fields.get("tools", "tools")))
    return Conversation(messages, tools, notes=notes)
