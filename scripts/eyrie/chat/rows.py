"""From messages to rows of token ids and loss masks, for one template and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from eyrie.chat import kimi
from eyrie.chat.encoders import Encoder, KimiEncoder
from eyrie.chat.errors import ChatError
from eyrie.chat.marks import Kind, Marks, Messages, Place, Rendered, Style, Tools
from eyrie.chat.spans import MessageSpans, Span
from eyrie.chat.templates import Template
from eyrie.chat.turns import answered

LossOn = Literal["assistant", "non_system", "all"]

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


@dataclass(frozen=True)
class ChatRow:
    """Token ids, the mask with 1 for a supervised token, and which of the assistant's turns the row is for.

    turn counts from 0; None where the row has the whole conversation.
    """

    ids: list[int]
    loss_mask: list[int]
    turn: int | None = None


class RowMaker:
    """Makes rows of conversations."""

    def __init__(self, encoder: Encoder, template: Template) -> None:
        self._encoder = encoder
        self._template = template
        self._is_kimi = isinstance(encoder, KimiEncoder)
        # The first K2 answers at once.
        self._thinks_as_kimi = self._is_kimi and kimi.THINK in encoder.control_ids

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        """The ids of the messages and the generation prompt. Raises ChatError."""
        marks = self._marks(messages, tools)
        _, rendered = self._render(marks, len(messages), self._template.apply_for_answer)
        return self._tokens(marks, rendered.text, [], [])[0]

    def rows(self, messages: Messages, tools: Tools, loss_on: LossOn) -> list[ChatRow]:
        """The rows of a finished conversation. Raises ChatError."""
        marks = self._marks(messages, tools)
        turns = [number for number, message in enumerate(marks.messages) if message["role"] == "assistant"]
        style, whole = self._render(marks, len(messages), self._template.apply)
        if self._keeps_history(marks, style, whole, turns):
            return [self._row(marks, whole, turns, loss_on, since=-1)]
        return [
            self._turn_row(marks, style, before, turn, loss_on, number if len(turns) > 1 else None)
            for number, (before, turn) in enumerate(pairwise([-1, *turns]))
        ]

    def continuation(
        self, history: Sequence[Messages], following: Messages, tools: Tools, last_id: int | None
    ) -> list[int]:
        """The ids between an answer and the next one. Raises ChatError."""
        first: ChatError | None = None
        for messages, answer in answered(history, following):
            try:
                return self._behind(self._marks(messages, tools), answer, last_id)
            except ChatError as error:
                first = first or error
        assert first is not None
        raise first

    def _behind(self, marks: Marks, answer: int, last_id: int | None) -> list[int]:
        """All that stands behind an answer, the end of its turn first unless last_id is one."""
        _, rendered = self._render(marks, len(marks.messages), self._template.apply_for_answer)
        said = MessageSpans(self._template, marks.messages, rendered).turn(answer)
        end_id = self._tokens(marks, rendered.text[said.start : said.end], [], [])[0][-1]
        behind = self._tokens(marks, rendered.text[said.end :], [], [])[0]
        if end_id not in self._template.end_ids or self._template.is_ended(last_id, end_id):
            return behind
        return [end_id, *behind]

    def _marks(self, messages: Messages, tools: Tools) -> Marks:
        known = [self._with_reasoning(message) for message in messages]
        if self._is_kimi:
            known = kimi.with_call_ids(known)
        return Marks(known, tools, self._encoder.control_ids)

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with a thought at its beginning taken out of the content, where the target thinks.

        As content, it would stand behind a second, empty pair of the template's own tags.
        """
        content = message.get("content")
        if message.get("role") != "assistant":
            return message
        if content is None and message.get("tool_calls"):
            return message | {"content": ""}
        if not isinstance(content, str) or "think>" not in content or message.get("reasoning_content"):
            return message
        if not (self._thinks_as_kimi or self._template.renders_reasoning):
            return message
        if found := _THOUGHT.fullmatch(content):
            # As the templates that look for the tags themselves do; Kimi's has no blanks around them.
            content = found[2] if self._thinks_as_kimi else found[2].lstrip("\n")
            thought = {"reasoning_content": found[1]} if found[1].strip() else {}
            return message | {"content": content} | thought
        if content.lstrip().startswith("<think>") or ("</think>" in content and "<think>" not in content):
            raise ChatError(
                "an answer has one of the tags <think> and </think> without the other", "reasoning_unclear"
            )
        return message

    def _render(
        self, marks: Marks, count: int, apply: Callable[[Messages, Tools], str]
    ) -> tuple[Style, Rendered]:
        """The first style that the template takes, and what it makes of it."""
        first: ChatError | None = None
        for style in marks.styles():
            try:
                return style, marks.render(apply, count, style)
            except ChatError as error:
                first = first or error
        assert first is not None
        raise first

    def _lost(self, marks: Marks, rendered: Rendered, turns: Iterable[int]) -> list[int]:
        """The turns of which there is a reasoning that was not rendered."""
        there = {place.message for place in rendered.places if place.kind == "reasoning"}
        return [turn for turn in turns if marks.messages[turn].get("reasoning_content") and turn not in there]

    def _keeps_history(self, marks: Marks, style: Style, whole: Rendered, turns: Sequence[int]) -> bool:
        """Whether what was rendered at earlier turns begins what is rendered now.

        Looked at after turns 1, 2, 4, 8 and so on, which together costs about as much as the whole once more,
        and after the last two.
        """
        if self._lost(marks, whole, turns):
            return False
        numbers = {2**power for power in range(len(turns).bit_length())} | {len(turns) - 1, len(turns)}
        counts = {turns[number - 1] + 1 for number in numbers if 0 < number <= len(turns)}
        return all(
            whole.marked.startswith(marks.marked(self._template.apply, count, style))
            for count in sorted(counts - {len(marks.messages)})
        )

    def _turn_row(
        self, marks: Marks, style: Style, before: int, turn: int, loss_on: LossOn, number: int | None
    ) -> ChatRow:
        """The row of one turn with the history as the target saw it then."""
        if self._thinks_as_kimi:
            rendered = self._put_behind_prompt(marks, style, turn)
        else:
            rendered = marks.render(self._template.apply, turn + 1, style)
        if self._lost(marks, rendered, [turn]):
            raise ChatError(
                "the target's chat template leaves out the reasoning of an answer, which would teach answers "
                "without it",
                "reasoning_lost",
            )
        return self._row(marks, rendered, [turn], loss_on, since=before, number=number)

    def _put_behind_prompt(self, marks: Marks, style: Style, turn: int) -> Rendered:
        """The turn's prompt and what the target generated after it, in Kimi's format."""
        message = marks.messages[turn]
        thinks = bool(message.get("reasoning_content"))
        prompt = self._template.apply_for_answer if thinks else self._template.apply_for_quick_answer
        asked = marks.render(prompt, turn, style)
        answer = kimi.answer_text(message, asked.text)
        kind: Kind = "reasoning" if thinks else "content"
        place = Place(turn, kind, len(asked.text), len(asked.text) + len(answer) - len(kimi.END))
        return Rendered("", asked.text + answer, [*asked.places, place])

    def _row(
        self,
        marks: Marks,
        rendered: Rendered,
        turns: Sequence[int],
        loss_on: LossOn,
        since: int,
        number: int | None = None,
    ) -> ChatRow:
        """A row with the messages after `since` supervised; `turns` are encoded apart from what is around."""
        of_message = MessageSpans(self._template, marks.messages, rendered)
        spans = {turn: of_message.turn(turn) for turn in turns}
        supervised: list[Span] = []
        if loss_on == "all":
            start = of_message.turn(since).end if since >= 0 else 0
            supervised.append(Span(start, len(rendered.text)))
        else:
            for message in range(since + 1, len(marks.messages)):
                if message in spans:
                    supervised.append(spans[message])
                elif loss_on == "non_system" and marks.messages[message]["role"] != "system":
                    supervised += of_message.texts(message)
        ids, mask = self._tokens(marks, rendered.text, list(spans.values()), sorted(supervised))
        return ChatRow(ids, mask, number)

    def _tokens(
        self, marks: Marks, text: str, cuts: Sequence[Span], supervised: Sequence[Span]
    ) -> tuple[list[int], list[int]]:
        """The text's ids and mask: the pieces between control tokens and cuts, each encoded by itself."""
        pieces = list(self._template.pieces(text, {edge for span in cuts for edge in span}))
        encoded = iter(
            self._encoder.encode([marks.shown(text[a:b]) for a, b, control in pieces if control is None])
        )
        ids: list[int] = []
        mask: list[int] = []
        at = 0
        for start, end, control in pieces:
            while at < len(supervised) and supervised[at].end <= start:
                at += 1
            piece = next(encoded) if control is None else [control]
            ids += piece
            touches = at < len(supervised) and supervised[at].start < end
            whole = touches and supervised[at].start <= start and end <= supervised[at].end
            if touches and not whole and control is None:
                mask += self._partly(
                    marks, text[start:end], [(a - start, b - start) for a, b in supervised[at:]]
                )
            else:
                mask += [int(whole)] * len(piece)
        return ids, mask

    def _partly(self, marks: Marks, piece: str, spans: Iterable[tuple[int, int]]) -> list[int]:
        """1 for the tokens of a piece that begin inside a span; for all where the tokenizer can't say it."""
        shown = marks.shown(piece)
        starts = self._encoder.starts(shown)
        if starts is None:
            return [1] * len(self._encoder.encode([shown])[0])
        inside: list[range] = []
        for first, last in spans:
            if first >= len(piece):
                break
            inside.append(range(len(marks.shown(piece[: max(first, 0)])), len(marks.shown(piece[:last]))))
        return [int(any(start in span for span in inside)) for start in starts]
