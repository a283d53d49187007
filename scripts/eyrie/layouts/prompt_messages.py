"""A prompt that is a list of messages or a text, row by row, and perhaps what completes it (TRL).

{"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]}
{"prompt": "Hi", "chosen": "Hello"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    checked_turns,
    column,
    declared_tools,
    entry,
    message,
    optional_column,
    parsed,
    refuse_media,
    system_turn,
)

COLUMNS = ("prompt",)
OPTIONAL = ("completion", "chosen", "system", "tools")
EXPECTED = "a column `prompt` with a text or a list of {role, content}, and perhaps `completion` or `chosen`"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The prompt and, where there is one, its completion or else the chosen answer."""
    refuse_media(row)
    name = fields.get("prompt", "prompt")
    prompt = _turns(column(row, name), name, "user")
    answer: list[Message] = []
    for key in ("completion", "chosen"):
        other = fields.get(key, key)
        if not answer and optional_column(row, other) is not None:
            answer = _turns(column(row, other), other, "assistant")
    # Some rows repeat the prompt before the answer.
    messages = answer if answer[: len(prompt)] == prompt else prompt + answer
    if messages and messages[0]["role"] != "system":
        messages = system_turn(row, fields.get("system", "system")) + messages
    tools, notes = declared_tools(optional_column(row, fields.get("tools", "tools")))
    return Conversation(messages, tools, notes=notes)


def _turns(value: Any, name: str, speaker: str) -> list[Message]:
    if isinstance(value, str) and value.lstrip().startswith("[") and isinstance(parsed(value), list):
        value = parsed(value)
    if value is None or isinstance(value, str):
        return [message(speaker, value)]
    turns = checked_turns(value if isinstance(value, list) else [value], name)
    return [message(entry(turn, "role"), turn.get("content"), turn) for turn in turns]
