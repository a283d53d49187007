"""A whole chat in one text, its messages between the marks of Harmony (gpt-oss).

    {"text": "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"}

A row may be the text itself. What the assistant says on the channel analysis is the reasoning of the turn
that follows; what it sends to a function is a call. The developer's message declares functions in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, Message, SkipRow, call, message, refuse_media, whole_text

COLUMNS = ("text",)
OPTIONAL = ()
EXPECTED = "a column `text` with messages as <|start|>role<|message|>words<|end|>"

_START = re.compile(r"(?:\A|<\|end\|>|<\|return\|>|<\|call\|>)\s*<\|start\|>")
_END = re.compile(r"(?:<\|end\|>|<\|return\|>|<\|call\|>)\s*\Z")
_RECIPIENT = re.compile(r"\bto=(\S+)")


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The text's messages; the last header without a message is what an engine was to continue."""
    refuse_media(row)
    name = fields.get("text", "text")
    text = whole_text(row, name)
    before, *pieces = _START.split(text)
    if before.strip():
        raise SkipRow(f"bad_type:{name}")
    messages: list[Message] = []
    reasoning = ""
    for place, piece in enumerate(pieces):
        header, mark, words = piece.partition("<|message|>")
        if not mark:
            if place + 1 < len(pieces):
                raise SkipRow("damaged_turns")
            continue
        made, is_reasoning = _message(header, _END.sub("", words))
        if is_reasoning:
            reasoning += made["content"]
            continue
        if reasoning and made["role"] == "assistant":
            made["reasoning_content"] = reasoning
        reasoning = ""
        messages.append(made)
    return Conversation(messages, system_declares_tools=True)


def _message(header: str, words: str) -> tuple[Message, bool]:
    """The message, and whether it is reasoning about the next."""
    sender, _, channel = header.partition("<|channel|>")
    recipient = _RECIPIENT.search(header)
    role = sender.split(" ")[0].strip()
    if role.startswith("functions."):
        return message("tool", words, {"name": role.removeprefix("functions.")}), False
    made = message(role, words)
    if made["role"] == "assistant" and recipient is not None and recipient[1] != "assistant":
        made |= {"content": "", "tool_calls": [call(recipient[1].removeprefix("functions."), words)]}
    return made, made["role"] == "assistant" and channel.split("<|")[0].split(" ")[0] == "analysis"
