"""A target's chat template: what it makes of messages, and what it puts before and behind an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from eyrie.chat.encoders import Encoder
from eyrie.chat.errors import ChatError
from eyrie.chat.marks import Messages, Tools
from eyrie.config import ConfigError
from eyrie.target import read_eos_ids

_QUESTION = {"role": "user", "content": "Why?"}
_ANSWER = {"role": "assistant", "content": "So."}
# The switches by which templates let the model answer without thinking; a template ignores unknown ones.
_NO_THINKING = {"enable_thinking": False, "thinking": False}


class Template:
    """The template of one target. Raises ConfigError where it or the tokenizer can't serve."""

    def __init__(self, encoder: Encoder, path: Path) -> None:
        self._encoder = encoder
        self.control = re.compile(encoder.control_pattern)
        try:
            finished = self.apply([_QUESTION, _ANSWER])
        except ChatError as error:
            raise ConfigError(f"{path}: a question and an answer are too much for it: {error}") from error
        self.closing_ids = frozenset(self._ids_behind(finished, _ANSWER["content"]))
        self.end_ids = {*read_eos_ids(path), *self.closing_ids}
        self._check_pieces(path)

    def apply(
        self, messages: Messages, tools: Tools = None, generation_prompt: bool = False, **switches: Any
    ) -> str:
        """The rendered text. Raises ChatError where the template refuses the messages."""
        try:
            return self._encoder.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False, **switches
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatError(f"the target's chat template refuses the messages: {error}") from error

    def apply_for_answer(self, messages: Messages, tools: Tools) -> str:
        """The rendered text that asks for an answer. Raises ChatError."""
        return self.apply(messages, tools, generation_prompt=True)

    def apply_for_quick_answer(self, messages: Messages, tools: Tools) -> str:
        """The same for an answer without thinking. Raises ChatError."""
        return self.apply(messages, tools, generation_prompt=True, **_NO_THINKING)

    def pieces(self, text: str, cuts: Iterable[int] = ()) -> Iterator[tuple[int, int, int | None]]:
        """A rendered text as (start, end, id of the control token or None for plain text), none empty.

        cuts: positions between which a plain text is divided, too.
        """
        edges = sorted(cuts)
        start = at = 0
        for control in self.control.finditer(text):
            while at < len(edges) and edges[at] < control.end():
                if start < edges[at] < control.start():
                    yield start, edges[at], None
                    start = edges[at]
                at += 1
            if start < control.start():
                yield start, control.start(), None
            yield control.start(), control.end(), self._control_id(control)
            start = control.end()
        for edge in (*edges[at:], len(text)):
            if start < edge:
                yield start, edge, None
                start = edge

    def end_of_turn(self, text: str, start: int, stop: int) -> int | None:
        """Where the first end token between two positions ends; None where there is none."""
        for control in self.control.finditer(text, start, stop):
            if self._control_id(control) in self.end_ids:
                return control.end()
        return None

    def is_ended(self, last_id: int | None, end_id: int) -> bool:
        """Whether an answer's last token ends its turn where the template has end_id.

        Any end token does, unless end_id belongs to what follows (some templates have no other end of a turn
        than the sign of the next speaker): then another sign of that kind does not.
        """
        return last_id == end_id or (last_id in self.end_ids and end_id in self.closing_ids)

    def _control_id(self, found: re.Match[str]) -> int:
        return self._encoder.control_ids[found.group().strip()]

    @cached_property
    def opening(self) -> str:
        """What stands before an answer: the generation prompt."""
        return self._opening()

    @cached_property
    def opening_without_thinking(self) -> str:
        """The same where the target is told not to think; `opening` itself in most templates."""
        return self._opening(**_NO_THINKING)

    def _opening(self, **switches: Any) -> str:
        asked, asking = (
            self.apply([_QUESTION], generation_prompt=prompt, **switches) for prompt in (False, True)
        )
        return asking.removeprefix(asked) if asking.startswith(asked) else ""

    @cached_property
    def renders_reasoning(self) -> bool:
        """Whether the reasoning of a turn that has just ended is in the text."""
        sign = "Hmm."
        keys = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), sign)
        return sign in self.apply([_QUESTION, _ANSWER | keys])

    def _ids_behind(self, rendered: str, answer: str) -> list[int]:
        """The control token behind the answer, which ends a turn whatever the list of end tokens says."""
        place = rendered.rfind(answer) + len(answer)
        found = self.control.search(rendered, place)
        return [self._control_id(found)] if found and not rendered[place : found.start()].strip() else []

    def _check_pieces(self, path: Path) -> None:
        """Encoding piece by piece must give the ids of the whole text."""
        talk = [
            {**_QUESTION, "content": " a b"},
            {**_ANSWER, "content": "\nc "},
            {**_QUESTION, "content": "d\n"},
        ]
        text = self.apply_for_answer(talk, None)
        pieces = list(self.pieces(text))
        encoded = iter(self._encoder.encode([text[a:b] for a, b, control in pieces if control is None]))
        ids = [n for _, _, control in pieces for n in (next(encoded) if control is None else [control])]
        if ids != self._encoder.encode_rendered(text):
            raise ConfigError(
                f"{path}: the target's tokenizer encodes a text otherwise than its pieces between control "
                "tokens; expected a tokenizer (as byte-level ones are) whose pieces are independent of what "
                "stands before them. Take another target"
            )
