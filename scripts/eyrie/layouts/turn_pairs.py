"""A list of exchanges, each an object that holds a question and its answer under the speakers' names.

{"system": "Be brief.", "conversation": [{"human": "Hi", "assistant": "Hello"}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, message, refuse_media, text_column, turns_column

COLUMNS = ("conversation",)
OPTIONAL = ("system",)
EXPECTED = "a column `conversation` with a list of {human, assistant}"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The row's turns; within an exchange the user speaks first, whatever the order of the keys."""
    refuse_media(row)
    messages = []
    for exchange in turns_column(row, fields.get("conversation", "conversation")):
        pair = [message(role, text) for role, text in exchange.items()]
        messages += sorted(pair, key=lambda made: made["role"] != "user")
    system = text_column(row, fields.get("system", "system"), required=False)
    if messages and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages)
