"""A whole chat in one text, each turn under its speaker's name at the start of a line.

    {"text": "Human: Hi\\n\\nAssistant: Hello\\n\\nHuman: Bye"}

The names may stand after ### as well. A name within a line is part of what is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from eyrie.layouts.base import Conversation, SkipRow, message, refuse_media, whole_text

COLUMNS = ("text",)
OPTIONAL = ()
EXPECTED = "a column `text` with turns that start a line with Human: (or User:) and Assistant:"

_SPEAKER = re.compile(r"(?:\A|\n)[ \t]*(?:### ?)?(System|Human|User|Assistant):")


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The text's turns; one speaker twice in a row shows that a name was part of what was said."""
    refuse_media(row)
    name = fields.get("text", "text")
    before, *pieces = _SPEAKER.split(whole_text(row, name))
    if before.strip():
        raise SkipRow(f"bad_type:{name}")
    messages = [
        message(speaker, words.strip()) for speaker, words in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if any(one["role"] == other["role"] for one, other in pairwise(messages)):
        raise SkipRow("damaged_turns")
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    return Conversation(messages)
