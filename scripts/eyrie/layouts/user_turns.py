"""A list of questions of one user, which are to be asked one after the other (MT-Bench).

    {"question_id": 81, "turns": ["Write a poem.", "Now make it rhyme."], "reference": ["..."]}

The answers are not among them: to let the speakers alternate would make answers of questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, SkipRow, column, refuse_media, system_turn

COLUMNS = ("turns",)
OPTIONAL = ("system",)
EXPECTED = "a column `turns` with a list of texts, all of them the user's"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The texts as user turns; a single text in place of the list is refused."""
    refuse_media(row)
    name = fields.get("turns", "turns")
    texts = column(row, name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SkipRow(f"bad_type:{name}")
    messages = [{"role": "user", "content": text} for text in texts]
    return Conversation(system_turn(row, fields.get("system", "system")) + messages if messages else [])
