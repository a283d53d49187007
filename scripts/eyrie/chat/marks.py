"""Private-use characters in the texts of a conversation, to find them again in what a template makes of it.

A text can hold the letters of a control token ("<|im_end|>" in a question about chat templates): they are
replaced by one character each before the template sees them, and put back before encoding. And each text is
marked at both ends. The marks stand inside the blanks at a text's edges, so that a template which trims does
with them what it does without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from eyrie.chat.errors import ChatError
from eyrie.records import canonical_json

Messages = Sequence[dict[str, Any]]
Tools = Sequence[Any] | None
Apply = Callable[[Messages, Tools], str]
Kind = Literal["reasoning", "content", "name", "arguments"]

# Templates ask for the reasoning under different names.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class Style(NamedTuple):
    """How texts are handed to a template, since templates differ in what they take."""

    mark_blanks: bool
    """Also mark texts without a letter; not for templates that ask whether there is any content."""
    parse_arguments: bool
    """Hand over the arguments of a tool call as an object and not as JSON text."""


class Place(NamedTuple):
    """Where a text of a message stands in the rendered text, blanks at its edges aside."""

    message: int
    kind: Kind
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """What a template made of a conversation: with marks, without, and where the texts are, by start."""

    marked: str
    text: str
    places: list[Place]


@dataclass(frozen=True)
class _Field:
    message: int
    kind: Kind
    core: str
    required: bool


class Marks:
    """A conversation's texts with signs for control tokens, and marks for one style of handing them over.

    With `|` for the mark's character, text 3 is marked as `|3|text||`.
    """

    def __init__(self, messages: Messages, tools: Tools, control: Iterable[str]) -> None:
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise ChatError(
                    f"a message of role {message.get('role')} has content of type "
                    f"{type(message.get('content')).__name__}; expected text"
                )
        used = set(canonical_json([messages, tools]))
        self._unused = (sign for code in range(0xF0000, 0x10FFFE) if (sign := chr(code)) not in used)
        longest_first = sorted(control, key=lambda text: (-len(text), text))
        self._control = re.compile("|".join(map(re.escape, longest_first)))
        self._sign_of: dict[str, str] = {}
        self.messages: list[dict[str, Any]] = [
            _with_reasoning_keys(self.hidden(message)) for message in messages
        ]
        self.tools = self.hidden(tools) if tools else None
        self._lookalikes = str.maketrans({sign: text for text, sign in self._sign_of.items()})
        self._edge = next(self._unused)
        self._mark = re.compile(f"{self._edge}([0-9]*){self._edge}")

    def hidden(self, value: Any) -> Any:
        """A value whose texts have signs for the letters of control tokens."""
        if isinstance(value, str):
            return self._control.sub(self._hide, value)
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(inner) for inner in value]
        return value

    def _hide(self, found: re.Match[str]) -> str:
        if found.group() not in self._sign_of:
            self._sign_of[found.group()] = next(self._unused)
        return self._sign_of[found.group()]

    def shown(self, text: str) -> str:
        """A text with the letters of control tokens put back."""
        return text.translate(self._lookalikes)

    def styles(self) -> list[Style]:
        """The styles that may make a difference here, the one that changes least first."""
        blank = any(
            not (message["content"].strip() or message.get("tool_calls")) for message in self.messages
        )
        calls = any(message.get("tool_calls") for message in self.messages)
        return [
            Style(mark_blanks, parse_arguments)
            for parse_arguments in ((False, True) if calls else (False,))
            for mark_blanks in ((True, False) if blank else (True,))
        ]

    def render(self, apply: Apply, count: int, style: Style) -> Rendered:
        """The first `count` messages through a template.

        The texts must stand in it whole, and the marks must change nothing else; a missing reasoning is the
        caller's matter. Raises ChatError.
        """
        marked, fields = self._hand_over(apply, count, style)
        rendered, found = self._find(marked, fields)
        plain = apply([_styled(message, style) for message in self.messages[:count]], self.tools)
        if rendered.text != self._unescaped(plain):
            raise ChatError("the target's chat template changes the content of a message", "content_lost")
        for number, field in enumerate(fields):
            if number not in found and field.required:
                raise ChatError(
                    f"the target's chat template leaves out the {field.kind} of message {field.message}",
                    "content_lost" if field.kind == "content" else "tool_calls_lost",
                )
        return rendered

    def marked(self, apply: Apply, count: int, style: Style) -> str:
        """The first `count` messages through a template, with marks, unchecked."""
        return self._hand_over(apply, count, style)[0]

    def _hand_over(self, apply: Apply, count: int, style: Style) -> tuple[str, list[_Field]]:
        fields: list[_Field] = []
        messages = [self._marked(n, style, fields) for n in range(count)]
        return self._unescaped(apply(messages, self.tools)), fields

    def _unescaped(self, rendered: str) -> str:
        """Templates that write JSON in ASCII, or Python's own form of a value, escape the signs."""
        for sign in [self._edge, *self._sign_of.values()] if "\\" in rendered else []:
            for escape in (json.dumps(sign)[1:-1], repr(sign)[1:-1]):
                rendered = rendered.replace(escape, sign)
        return rendered

    def _marked(self, number: int, style: Style, fields: list[_Field]) -> dict[str, Any]:
        """Message `number` with marks; appends what was marked to `fields`, so that marks count on."""

        def mark(kind: Kind, text: str, required: bool = True) -> str:
            core = text.strip()
            if not core and not style.mark_blanks:
                return text
            lead = text[: len(text) - len(text.lstrip())]
            trail = text[len(text.rstrip()) :] if core else ""
            edge, mark_number = self._edge, len(fields)
            fields.append(_Field(number, kind, core, required))
            return f"{lead}{edge}{mark_number}{edge}{core}{edge}{edge}{trail}"

        message = dict(_styled(self.messages[number], style))
        if reasoning := message.get("reasoning_content"):
            message |= dict.fromkeys(_REASONING_KEYS, mark("reasoning", reasoning, required=False))
        # Beside calls, which have marks of their own, many templates ask whether there is any content.
        if message["content"].strip() or not message.get("tool_calls"):
            message["content"] = mark("content", message["content"])
        if message.get("tool_calls"):
            message["tool_calls"] = [_marked_call(call, mark) for call in message["tool_calls"]]
        return message

    def _find(self, marked: str, fields: Sequence[_Field]) -> tuple[Rendered, set[int]]:
        """The texts that stand whole between their marks, and their numbers.

        What a template repeats counts where it is first.
        """
        pieces = self._mark.split(marked)
        places: list[Place] = []
        found: set[int] = set()
        length = len(pieces[0])
        for mark, text, end in zip(pieces[1::2], pieces[2::2], [*pieces[3::2], None], strict=True):
            if mark and end == "" and int(mark) not in found and text == fields[int(mark)].core:
                field = fields[int(mark)]
                found.add(int(mark))
                places.append(Place(field.message, field.kind, length, length + len(text)))
            length += len(text)
        return Rendered(marked, "".join(pieces[::2]), places), found


def _with_reasoning_keys(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    return message | dict.fromkeys(_REASONING_KEYS, reasoning) if reasoning else message


def _styled(message: dict[str, Any], style: Style) -> dict[str, Any]:
    if not (style.parse_arguments and message.get("tool_calls")):
        return message
    return message | {"tool_calls": [_parsed(call) for call in message["tool_calls"]]}


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ChatError(
                f"the arguments of a tool call are not JSON: {error}", "tool_calls_lost"
            ) from error
    return call | {"function": call["function"] | {"arguments": arguments}}


def _marked_call(call: dict[str, Any], mark: Callable[..., str]) -> dict[str, Any]:
    """A call with marks; some templates write its id, which holds the name, in place of the name."""
    function = dict(call["function"])
    as_text = isinstance(function.get("arguments"), str)
    function["name"] = mark("name", function["name"], required=not as_text)
    if as_text:
        function["arguments"] = mark("arguments", function["arguments"])
    return call | {"function": function}
