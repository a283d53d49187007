"""What the layouts share: the conversation they return, the row they refuse, roles, and the text of a turn.

Nothing here knows a layout: an edit to this file concerns every dataset, an edit to a layout only its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from eyrie.media import has_media_column, is_media_part, names_media
from eyrie.records import parse_json_strictly

Message = dict[str, Any]

_NAMES_OF_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter", "usr"),
    "assistant": (
        *("assistant", "gpt", "ai", "bot", "model", "chatgpt", "bing", "bard", "claude", "output", "answer"),
        *("function_call", "tool_call"),
    ),
    "tool": ("tool", "observation", "function", "function_response", "ipython", "environment"),
}
ROLES = {name: role for role, names in _NAMES_OF_ROLES.items() for name in names}
# Turns whose whole text is a call: the assistant speaks, in JSON.
CALL_ROLES = frozenset({"function_call", "tool_call"})

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", None})
_REASONING_PARTS = frozenset({"reasoning", "thinking"})
_CALL_PARTS = frozenset({"tool_call", "function_call"})
_PART_PAYLOADS = ("text", "value", "content", "reasoning", "thinking")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thinking_content")
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_PLAIN_KEYS = frozenset({"role", "content"})
_MISSING = object()


class SkipRow(Exception):
    """A row that cannot be used; `reason` is what the ledger counts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Tokens:
    """A row that was tokenized by others."""

    input_ids: list[int]
    loss_mask: list[int]
    """1 where the token of the same place is supervised; as long as input_ids."""


@dataclass(slots=True)
class Conversation:
    """A row as messages of the roles system, user, assistant and tool; every content is a string.

    Raises SkipRow where a question holds a placeholder of a picture or a sound.
    """

    messages: list[Message]
    """{"role", "content"} and where the row has them reasoning_content, tool_calls, name, tool_call_id."""
    tools: list[dict[str, Any]] | None = None
    """Declared functions as {"type": "function", "function": {...}}; None where the row declares none."""
    system_declares_tools: bool = False
    """The system turn declares the same functions in words: who keeps it needs no `tools` beside it."""
    notes: tuple[str, ...] = ()
    """What was given up or mended, counted in the ledger beside the skipped rows."""
    tokens: Tokens | None = None
    """Instead of messages, where the row holds token ids."""

    def __post_init__(self) -> None:
        for made in self.messages:
            if made["role"] == "user" and names_media(made["content"]):
                raise SkipRow("multimodal")


class Layout(Protocol):
    """What a module of this package offers."""

    COLUMNS: tuple[str, ...]
    """Columns that every row must have, under the names that `fields` may replace."""
    OPTIONAL: tuple[str, ...]
    """Columns that are read where they are present."""
    EXPECTED: str
    """What the layout looks for in a row, for error messages."""

    def read(self, row: Any, fields: Mapping[str, str]) -> Conversation:
        """The row as a conversation. `fields`: column names in place of the layout's own. Raises SkipRow."""


def canonical_role(name: object) -> str:
    """The one of four roles that a source's name stands for; a name not known is never guessed."""
    role = ROLES.get(name) or ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise SkipRow(f"unknown_role:{name!s:.40}")
    return role


def column(row: Any, name: str) -> Any:
    """The value of a column; a name with dots is a path where no column bears it. May be None."""
    value = _value(row, name)
    if value is _MISSING:
        raise SkipRow(f"missing_column:{name}" if isinstance(row, dict) else "bad_type:row")
    return value


def optional_column(row: Any, name: str) -> Any:
    """The value of a column, or None where the row lacks it."""
    value = _value(row, name)
    return None if value is _MISSING else value


def _value(row: Any, name: str) -> Any:
    if not isinstance(row, dict):
        return _MISSING
    if name in row or "." not in name:
        return row.get(name, _MISSING)
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def text_column(row: Any, name: str, required: bool = True) -> str:
    """The text of a column, "" for null; numbers and lists are no text."""
    value = column(row, name) if required else optional_column(row, name)
    if value is not None and not isinstance(value, str):
        raise SkipRow(f"bad_type:{name}")
    return value or ""


def whole_text(row: Any, name: str) -> str:
    """The text of a row that is a text itself, or of its column."""
    return row if isinstance(row, str) else text_column(row, name)


def system_turn(row: Any, name: str) -> list[Message]:
    """The system turn that a column holds, or none where the row lacks it or it is blank."""
    text = text_column(row, name, required=False)
    return [{"role": "system", "content": text}] if text.strip() else []


def list_column(row: Any, name: str) -> list[Any]:
    """The list in a column, given as such or as JSON text (even encoded twice); null is an empty list."""
    value = column(row, name)
    for _ in range(2):
        if isinstance(value, str):
            value = parsed(value)
    if value is None:
        value = []
    if not isinstance(value, list):
        raise SkipRow(f"bad_type:{name}")
    return value


def turns_column(row: Any, name: str) -> list[Mapping[str, Any]]:
    """The list of objects in a column."""
    return checked_turns(list_column(row, name), name)


def checked_turns(turns: list[Any], name: str) -> list[Mapping[str, Any]]:
    """The turns, all of them objects. Raises SkipRow: bad_type:<name>."""
    if not all(isinstance(turn, dict) for turn in turns):
        raise SkipRow(f"bad_type:{name}")
    return turns


def entry(turn: Mapping[str, Any], key: str) -> Any:
    """A turn's value, which may be null but must be there."""
    if key not in turn:
        raise SkipRow(f"missing_column:{key}")
    return turn[key]


def parsed(text: str) -> Any:
    """The value of a JSON text, or the text itself where it is none."""
    try:
        return parse_json_strictly(text.encode())
    except ValueError:
        return text


def refuse_media(row: Any) -> None:
    """Skip a row with a filled column of images, video or audio: its text alone is not what was asked."""
    if has_media_column(row):
        raise SkipRow("multimodal")


def message(role: object, content: object, extras: Mapping[str, Any] = _NOTHING) -> Message:
    """One turn as a message.

    role: the source's name for it. content: a string, null, or parts. extras: the turn's other entries, of
    which calls, reasoning and names are taken; those that Arrow filled with null count as absent.
    """
    text, reasoning, calls = (content, "", []) if isinstance(content, str) else _content(content)
    made: Message = {"role": canonical_role(role), "content": text}
    # Nearly all turns are just words: what follows is looked for only where there is more.
    if extras.keys() <= _PLAIN_KEYS and not reasoning and not calls and not _is_call(role):
        return made
    if made["role"] == "assistant":
        if _is_call(role):
            found = _calls(parsed(text))
            made["content"], calls = (text, calls) if found is None else ("", calls + found)
        calls += _declared_calls(extras)
        reasoning = reasoning or next((extras[key] for key in _REASONING_KEYS if extras.get(key)), "")
        if isinstance(reasoning, str) and reasoning.strip():
            made["reasoning_content"] = reasoning
        if calls:
            made["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if isinstance(extras.get(key), str) and extras[key]:
            made[key] = extras[key]
    # SWE-agent lists the calls that a result answers, of which there is one.
    answered = extras.get("tool_call_ids")
    if isinstance(answered, list) and len(answered) == 1 and isinstance(answered[0], str):
        made.setdefault("tool_call_id", answered[0])
    return made


def _is_call(role: object) -> bool:
    return isinstance(role, str) and role.lower() in CALL_ROLES


def _content(content: object) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, reasoning and calls of a content; the texts of parts are joined as they are."""
    if content is None:
        return "", "", []
    text, reasoning, calls = "", "", list[dict[str, Any]]()
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        payload = part if isinstance(part, str) else _payload(part)
        if is_media_part(part):
            raise SkipRow("multimodal")
        if payload is None:
            raise SkipRow("bad_type:content")
        if kind in _TEXT_PARTS:
            text += payload
        elif kind in _REASONING_PARTS:
            reasoning += payload
        elif kind in _CALL_PARTS and (found := _calls(parsed(payload))) is not None:
            calls += found
        else:
            raise SkipRow("bad_type:content")
    return text, reasoning, calls


def _payload(part: object) -> str | None:
    if not isinstance(part, dict) or "role" in part:
        return None
    return next((part[key] for key in _PART_PAYLOADS if isinstance(part.get(key), str)), None)


def _declared_calls(extras: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls in `tool_calls`, or the older `function_call`."""
    for key in ("tool_calls", "function_call"):
        value = extras.get(key)
        value = parsed(value) if isinstance(value, str) else value
        if value:
            found = _calls(value)
            if found is None:
                raise SkipRow(f"bad_type:{key}")
            return found
    return []


def _calls(value: object) -> list[dict[str, Any]] | None:
    """Calls in one form, or None where the value is no call or list of calls."""
    calls = []
    items: list[Any] = value if isinstance(value, list) else [value]
    for item in items:
        function = _function(item)
        if function is None:
            return None
        calls.append(call(function["name"], function.get("arguments"), item.get("id")))
    return calls or None


def _function(item: Any) -> Mapping[str, Any] | None:
    """The named function of a call or a declaration, which may stand bare or under `function`."""
    function = item.get("function", item) if isinstance(item, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def call(name: str, arguments: object, call_id: object = None) -> dict[str, Any]:
    """A call whose arguments are JSON text: a text is kept to the letter, a value is written without the
    nulls that Arrow puts where another row's call has an argument."""
    text = (
        arguments if isinstance(arguments, str) else json.dumps(_filled(arguments or {}), ensure_ascii=False)
    )
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": text}}
    return {"id": call_id, **made} if isinstance(call_id, str) and call_id else made


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner) for key, inner in value.items() if inner is not None}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value


def declared_tools(value: object) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """Function declarations in one form, from a list or its JSON text, and a note where they are neither."""
    if isinstance(value, str):
        value = parsed(value) if value.strip() else None
    if not value:
        return None, ()
    tools: dict[str, dict[str, Any]] = {}
    for item in value if isinstance(value, list) else [None]:
        function = _function(item)
        if function is None:
            return None, ("unreadable_tools",)
        # Some rows declare a function twice; engines refuse that.
        tools.setdefault(function["name"], {"type": "function", "function": dict(function)})
    return list(tools.values()), ()
