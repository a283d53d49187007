"""One string that holds a whole chat, its turns marked at line starts (Glaive function calling).

    {"system": "SYSTEM: You may call these functions -\\n{...}",
     "chat": "USER: When is high tide?\\n\\n\\nASSISTANT: <functioncall> {\\"name\\": \\"tide\\",
              \\"arguments\\": '{\\"place\\": \\"Nordby\\"}'} <|endoftext|>\\n\\n\\nFUNCTION RESPONSE: {...}"}

The arguments of a call stand as JSON between single quotes, which is no JSON, and functions are declared
one after the other in the system text. That text is kept whole; the declarations become `tools` beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import (
    Conversation,
    Message,
    SkipRow,
    call,
    declared_tools,
    parsed,
    refuse_media,
    text_column,
)

COLUMNS = ("chat",)
OPTIONAL = ("system",)
EXPECTED = (
    "a column `chat` with a string of turns that start a line with USER:, ASSISTANT: or FUNCTION RESPONSE:"
)

_MARKER = re.compile(r"(?:^|\n)[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):")
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_END = "<|endoftext|>"
_CALL = re.compile(r"<functioncall>\s*(\{.*\})\s*$", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The chat's turns; a damaged chat is skipped rather than cut in the wrong place."""
    refuse_media(row)
    name = fields.get("chat", "chat")
    before, *pieces = _MARKER.split(text_column(row, name))
    if before.strip():
        raise SkipRow(f"bad_type:{name}")
    turns = list(zip(pieces[::2], pieces[1::2], strict=True))
    _refuse_damage(turns)
    messages = [_message(_ROLES[marker], text.replace(_END, "").strip()) for marker, text in turns]
    system = text_column(row, fields.get("system", "system"), required=False)
    system = system.strip().removeprefix("SYSTEM:").strip()
    if messages and system:
        messages.insert(0, {"role": "system", "content": system})
    tools, notes = declared_tools(_declarations(system))
    return Conversation(messages, tools, system_declares_tools=True, notes=notes)


def _refuse_damage(turns: list[tuple[str, str]]) -> None:
    """Some rows have "ASSISTANT:" at a line start inside a turn. An answer, and nothing else, closes with the
    end mark: an answer that another follows without it, or a mark that closes nothing, betrays them."""
    followers = [*(marker for marker, _ in turns[1:]), ""]
    for (marker, text), following in zip(turns, followers, strict=False):
        _, mark, rest = text.partition(_END)
        if rest.replace(_END, "").strip() or (not mark and marker == following == "ASSISTANT"):
            raise SkipRow("damaged_turns")
        if mark and marker != "ASSISTANT" and following:
            raise SkipRow("damaged_turns")


def _message(role: str, text: str) -> Message:
    made: Message = {"role": role, "content": text}
    found = _CALL.search(text) if role == "assistant" else None
    read_call = _read_call(found[1]) if found else None
    if found and read_call:
        made |= {"content": text[: found.start()].strip(), "tool_calls": [read_call]}
    return made


def _read_call(text: str) -> dict[str, Any] | None:
    """A call, or None where it cannot be read: then its text stays the answer's text, as it was written."""
    name, start = _NAME.search(text), _ARGUMENTS.search(text)
    if name is None:
        return None
    if start is None:
        return call(name[1], {})
    value = text[start.end() :].rstrip().removesuffix("}").rstrip()
    if value.startswith("'") and value.endswith("'") and len(value) > 1:
        value = value[1:-1].replace("\\'", "'")
    arguments = parsed(value)
    return None if isinstance(arguments, str) else call(name[1], arguments)


def _declarations(system: str) -> list[Any] | None:
    """The objects after the system text's first brace, as a list; None where anything else is among them."""
    start = system.find("\n{")
    if start < 0:
        return None
    decoder, declared = json.JSONDecoder(), []
    rest = system[start:].strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError:
            return [None]
        declared.append(value)
        rest = rest[end:].lstrip(" \t\r\n,")
    return declared
