"""A whole chat in one text, its turns between the marks of ChatML.

    {"text": "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n"}

A turn begins where the text does or where another has ended; the same letters inside of a turn are its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, SkipRow, message, refuse_media, whole_text

COLUMNS = ("text",)
OPTIONAL = ()
EXPECTED = "a column `text` with turns as <|im_start|>role, a line feed, the words, <|im_end|>"

_START = re.compile(
    r"(?:\A(?:<s>|<\|begin_of_text\|>|<\|endoftext\|>)?|<\|im_end\|>)\s*<\|im_start\|>([^\s<]+)\n"
)
_END = re.compile(r"<\|im_end\|>\s*(?:</s>|<\|endoftext\|>)?\s*\Z")


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The text's turns. A last turn that is opened and no more is for an engine to fill, and left out."""
    refuse_media(row)
    name = fields.get("text", "text")
    text = whole_text(row, name)
    before, *pieces = _START.split(text)
    if before.strip() or (text.strip() and not pieces):
        raise SkipRow(f"bad_type:{name}")
    turns = list(zip(pieces[::2], pieces[1::2], strict=True))
    if turns:
        role, last = turns[-1]
        turns[-1] = (role, _END.sub("", last))
        if turns[-1][1] == "" and not _END.search(last):
            turns.pop()
    return Conversation([message(role, words) for role, words in turns])
