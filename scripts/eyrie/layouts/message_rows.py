"""One message a row, linked to the one that it answers (Open Assistant as a table).

    {"message_id": "m1", "parent_id": null, "text": "Hi", "role": "prompter"}
    {"message_id": "m2", "parent_id": "m1", "text": "Hello", "role": "assistant"}

Rows are read one by one, so that only the prompts are found: the messages that answer none. The others are
counted as not_a_root, and the share of kept rows is small by nature (see `gates`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, SkipRow, column, message, optional_column, refuse_media

COLUMNS = ("text", "role", "parent_id")
OPTIONAL = ("deleted",)
EXPECTED = "columns `text`, `role` and `parent_id`, the last null for a prompt"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """A prompt that answers no other message."""
    refuse_media(row)
    text, role, parent = (column(row, fields.get(name, name)) for name in COLUMNS)
    made = message(role, text)
    if parent not in (None, ""):
        raise SkipRow("not_a_root")
    if optional_column(row, fields.get("deleted", "deleted")) is True:
        raise SkipRow("deleted")
    return Conversation([made])
