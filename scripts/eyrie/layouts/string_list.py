"""A list of texts that user and assistant speak in turn (UltraChat as it was first published).

    {"id": "0", "data": ["Hi", "Hello", "Bye"]}

The user begins, and may have the last word. Lists of questions alone are the layout user_turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, SkipRow, column, refuse_media, system_turn

COLUMNS = ("data",)
OPTIONAL = ("system",)
EXPECTED = "a column `data` with a list of texts, the user's first"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The texts as turns; a text in place of the list is refused: its letters would be the turns."""
    refuse_media(row)
    name = fields.get("data", "data")
    texts = column(row, name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SkipRow(f"bad_type:{name}")
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)
    ]
    return Conversation(system_turn(row, fields.get("system", "system")) + messages if messages else [])
