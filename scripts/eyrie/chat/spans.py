"""Which part of a rendered text each message is."""

from __future__ import annotations

from typing import NamedTuple

from eyrie.chat.errors import ChatError
from eyrie.chat.marks import Messages, Rendered
from eyrie.chat.templates import Template


class Span(NamedTuple):
    """A part of a rendered text."""

    start: int
    end: int


class MessageSpans:
    """The messages in a rendered text, between the places of their texts."""

    def __init__(self, template: Template, messages: Messages, rendered: Rendered) -> None:
        self._template = template
        self._messages = messages
        self._text = rendered.text
        self._places = rendered.places
        self._of_message: dict[int, list[int]] = {}
        for at, place in enumerate(rendered.places):
            self._of_message.setdefault(place.message, []).append(at)

    def turn(self, message: int) -> Span:
        """What the target generated to give a message of the assistant: all between the generation prompt and
        the end of the turn, the end token included.

        Where the answer is without reasoning, a pair of empty tags before it is the prompt's.
        Raises ChatError.
        """
        own = self._of_message.get(message)
        if own is None:
            raise ChatError(
                f"nothing of message {message} can be found in what the template makes of it", "content_lost"
            )
        first, last = self._places[own[0]], self._places[own[-1]]
        floor = self._places[own[0] - 1].end if own[0] > 0 else 0
        ceiling = self._places[own[-1] + 1].start if own[-1] + 1 < len(self._places) else len(self._text)
        end = self._template.end_of_turn(self._text, last.end, ceiling)
        if end is None and self._messages[message].get("tool_calls"):
            raise ChatError(
                "the target's chat template puts no end-of-turn token after tool calls", "no_end_of_turn"
            )
        start = self._after_opening(floor, first.start, thinks=first.kind == "reasoning")
        if start is None:
            start = self._with_blanks_before(message, first.start, floor)
        return Span(start, self._with_blanks_behind(message, last.end) if end is None else end)

    def _after_opening(self, floor: int, place: int, thinks: bool) -> int | None:
        openings = [self._template.opening]
        if not thinks:
            openings.insert(0, self._template.opening_without_thinking)
        for opening in filter(None, openings):
            found = self._text.rfind(opening, floor, place)
            if found >= 0:
                return found + len(opening)
        return None

    def texts(self, message: int) -> list[Span]:
        """The texts of a message of another role, each with the control token right behind it."""
        spans = []
        for at in self._of_message.get(message, []):
            place = self._places[at]
            floor = self._places[at - 1].end if at > 0 else 0
            end = self._with_blanks_behind(message, place.end)
            control = self._template.control.match(self._text, end)
            spans.append(
                Span(self._with_blanks_before(message, place.start, floor), control.end() if control else end)
            )
        return spans

    def _with_blanks_before(self, message: int, place: int, floor: int) -> int:
        """The beginning of a text with as much of the blanks at its edge as the template left."""
        content: str = self._messages[message]["content"]
        lead = content[: len(content) - len(content.lstrip())]
        before = self._text[max(floor, place - len(lead)) : place]
        return place - _common(lead[::-1], before[::-1])

    def _with_blanks_behind(self, message: int, place: int) -> int:
        """The end of a text with as much of the blanks at its edge as the template left."""
        content: str = self._messages[message]["content"]
        trail = content[len(content.rstrip()) :] if content.strip() else ""
        return place + _common(trail, self._text[place : place + len(trail)])


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
