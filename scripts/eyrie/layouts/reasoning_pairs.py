"""A problem, the thinking about it, and the response, each in its own column.

    {"problem": "Sum the even digits of 4821", "thinking": "4+8+2 ...", "response": "14"}

Some sources put the thinking into the response, between <think> and </think>; it is taken out there, since a
template that adds its own marks would double them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, Message, refuse_media, text_column

COLUMNS = ("problem", "response")
OPTIONAL = ("thinking", "system")
EXPECTED = "columns `problem`, `thinking` and `response`, with text"

_INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """Problem and response as turns, the thinking as the response's reasoning."""
    refuse_media(row)
    response = text_column(row, fields.get("response", "response"))
    thinking = text_column(row, fields.get("thinking", "thinking"), required=False)
    inline = _INLINE.match(response)
    if inline is not None and not thinking.strip():
        thinking, response = inline[1].strip(), response[inline.end() :]
    answer: Message = {"role": "assistant", "content": response}
    if thinking.strip():
        answer["reasoning_content"] = thinking
    messages = [{"role": "user", "content": text_column(row, fields.get("problem", "problem"))}, answer]
    system = text_column(row, fields.get("system", "system"), required=False)
    if system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages)
