"""What an engine was asked and what it answered, in the form of the OpenAI API.

    {"request": {"messages": [{"role": "user", "content": "Hi"}]},
     "response": {"choices": [{"message": {"role": "assistant", "content": "Hello"}}]}}

Both may lie in a `body`, as batch files have them, and either may be JSON text. Of several choices the first
counts. A request without a response is a prompt all the same; `fields: {request: body}` reads the requests of
a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    SkipRow,
    column,
    declared_tools,
    entry,
    message,
    optional_column,
    parsed,
    refuse_media,
    turns_column,
)

COLUMNS = ("request",)
OPTIONAL = ("response",)
EXPECTED = "a column `request` with `messages` in it, and perhaps `response` with `choices`"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The request's messages and tools, and the response's first choice."""
    refuse_media(row)
    name = fields.get("request", "request")
    request = _opened(column(row, name), name)
    if optional_column(request, "messages") is None:
        raise SkipRow(f"missing_column:{name}.messages")
    messages = [
        message(entry(turn, "role"), turn.get("content"), turn) for turn in turns_column(request, "messages")
    ]
    name = fields.get("response", "response")
    response = optional_column(row, name)
    if messages and response is not None:
        messages += _answer(_opened(response, name))
    tools, notes = declared_tools(request.get("tools"))
    return Conversation(messages, tools, notes=notes)


def _opened(value: Any, name: str) -> Mapping[str, Any]:
    """The object, out of its JSON text and out of the `body` that it may lie in."""
    value = parsed(value) if isinstance(value, str) else value
    inner = value.get("body") if isinstance(value, Mapping) else None
    inner = parsed(inner) if isinstance(inner, str) else inner
    value = inner if isinstance(inner, Mapping) else value
    if not isinstance(value, Mapping):
        raise SkipRow(f"bad_type:{name}")
    return value


def _answer(response: Mapping[str, Any]) -> list[Message]:
    """The answer in a response; a failed request has none."""
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    spoken = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(spoken, Mapping):
        return []
    return [message(spoken.get("role", "assistant"), spoken.get("content"), spoken)]
