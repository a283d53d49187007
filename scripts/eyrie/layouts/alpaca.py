"""Instructions with an optional input, the Alpaca way.

    {"instruction": "Translate.", "input": "Guten Tag", "output": "Good day", "history": [["Hi", "Hello"]]}

Instruction and input are joined by an empty line. A history comes before them, so its first question is the
conversation's first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    SkipRow,
    list_column,
    optional_column,
    refuse_media,
    text_column,
)

COLUMNS = ("instruction",)
OPTIONAL = ("input", "output", "response", "system", "history")
EXPECTED = "a column `instruction` and perhaps `input`, `output` and `history`, with text"

# What some copies write where there is no input.
_NO_INPUT = frozenset({"", "<noinput>"})


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """History, instruction and output as turns."""
    refuse_media(row)

    def text(name: str) -> str:
        return text_column(row, fields.get(name, name), required=False)

    asked = text_column(row, fields.get("instruction", "instruction"))
    given = text("input")
    if given.strip().lower() not in _NO_INPUT:
        asked = f"{asked}\n\n{given}" if asked.strip() else given
    messages = [*_history(row, fields.get("history", "history")), {"role": "user", "content": asked}]
    if answer := text("output") or text("response"):
        messages.append({"role": "assistant", "content": answer})
    if text("system").strip():
        messages.insert(0, {"role": "system", "content": text("system")})
    return Conversation(messages)


def _history(row: Any, name: str) -> list[Message]:
    messages: list[Message] = []
    if optional_column(row, name) is None:
        return messages
    for pair in list_column(row, name):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise SkipRow(f"bad_type:{name}")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages
