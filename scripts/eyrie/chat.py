"""Chats as the target reads them: its own template, token ids, and which tokens are supervised.

A text from a dataset can hold the letters of a control token ("<|im_end|>" in a question about chat
templates). Encoded as it stands it would end the turn there; here it stays text. Such look-alikes are told
from the template's own control tokens by rendering with private-use characters in their place. The rendered
text is then cut at the control tokens, and the pieces between are encoded with control tokens switched off.
A control token is never merged with its neighbours, so this gives the ids of the whole text, and takes time
in proportion to its length.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from tokenizers import processors
from transformers import AutoTokenizer

from eyrie.config import ConfigError
from eyrie.records import RecordError, canonical_json
from eyrie.target import read_eos_ids

LossOn = Literal["assistant", "non_system", "all"]
Messages = Sequence[dict[str, Any]]
Tools = Sequence[Any] | None


class ChatError(RecordError):
    """A conversation that the target's template or tokenizer can't take; the message says why."""


class Chat:
    """The chat format of one target: its template and its tokenizer, from the target's folder.

    Raises ConfigError where the folder has no chat template, or a tokenizer without offsets.
    """

    def __init__(self, path: Path) -> None:
        self.tokenizer = _load_tokenizer(path)
        self._end_ids = {*read_eos_ids(path), self.tokenizer.eos_token_id}
        self._control_ids = {
            token.content: number
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special
        }
        longest_first = sorted(self._control_ids, key=lambda text: (-len(text), text))
        self._control = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    @property
    def template_sha256(self) -> str:
        """The digest of the template's text (of all of them where the target has several)."""
        template = self.tokenizer.chat_template
        text = template if isinstance(template, str) else canonical_json(template)
        return hashlib.sha256(text.encode()).hexdigest()

    def prompt_ids(self, messages: Messages, tools: Tools = None) -> list[int]:
        """The tokens that ask for an answer: the messages and the generation prompt. Raises ChatError."""
        return self._tokens(messages, tools, generation_prompt=True, supervised=frozenset())[0]

    def conversation_ids(
        self, messages: Messages, tools: Tools = None, loss_on: LossOn = "assistant"
    ) -> tuple[list[int], list[int]]:
        """The tokens of a finished conversation and its loss mask, 1 for a supervised token.

        A message's tokens are those that begin inside its content, and the control token that follows it;
        with tool calls, all up to the end of the turn. loss_on: assistant takes the assistant's messages,
        non_system every message but the system's, all every token, the template's own included.
        Raises ChatError.
        """
        supervised = frozenset(
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" or (loss_on != "assistant" and message["role"] != "system")
        )
        ids, mask = self._tokens(messages, tools, generation_prompt=False, supervised=supervised)
        return ids, [1] * len(ids) if loss_on == "all" else mask

    def _tokens(
        self, messages: Messages, tools: Tools, generation_prompt: bool, supervised: frozenset[int]
    ) -> tuple[list[int], list[int]]:
        signs = _Signs(messages, tools, self._control)
        # Texts at the even places, the template's control tokens between them.
        parts = self._control.split(self._render(signs, generation_prompt))
        texts = [signs.read(part, supervised) for part in parts[::2]]
        controls = [self._control_ids[part] for part in parts[1::2]]
        encoded = self._encode([text.text for text in texts])
        ids: list[int] = []
        mask: list[int] = []
        goes_on: Reach = "content"
        for place, (text, (text_ids, offsets)) in enumerate(zip(texts, encoded, strict=True)):
            ids += text_ids
            if goes_on == "turn":
                mask += [1] * len(text_ids)
            else:
                mask += _begins_inside(offsets, text.spans)
                goes_on = text.reach
            if place < len(controls):
                ids.append(controls[place])
                mask.append(int(goes_on != "content"))
                if goes_on == "token" or controls[place] in self._end_ids:
                    goes_on = "content"
        if goes_on == "turn":
            raise ChatError("the target's chat template puts no end-of-turn token after tool calls")
        if not signs.has_lookalikes:
            self._compare(signs.removed("".join(parts)), ids)
        return ids, mask

    def _render(self, signs: _Signs, generation_prompt: bool) -> str:
        """The rendered text with each content between its marks.

        A template may trim contents, which marks around them would prevent: so the text without marks must
        be what the template makes of messages without marks.
        """
        plain = self._apply(signs.messages, signs.tools, generation_prompt)
        for trim in (False, True):
            marked = self._apply(signs.marked(trim), signs.tools, generation_prompt)
            if signs.removed(marked) == plain and signs.all_there(marked, trim):
                return marked
        raise ChatError("the target's chat template leaves out or changes the content of a message")

    def _apply(self, messages: Messages, tools: Tools, generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatError(f"the target's chat template refuses the messages: {error}") from error

    def _encode(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        encoding = self.tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        return zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)

    def _compare(self, text: str, ids: list[int]) -> None:
        """Where nothing looks like a control token, the pieces' ids must be the whole text's."""
        if self.tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise ChatError(
                "the target's tokenizer encodes a text otherwise than its pieces between control tokens; "
                "expected a byte-level tokenizer whose control tokens stand alone"
            )


def _load_tokenizer(path: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{path}: the target's tokenizer can't be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{path}: {type(tokenizer).__name__} gives no offsets of its tokens in the text, which the loss "
            "mask needs; expected a tokenizer.json (convert the tokenizer, or take another target)"
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{path}: the target has no chat template; expected chat_template.jinja, or chat_template in "
            "tokenizer_config.json. Take an instruction-tuned target, or add its template"
        )
    # Post-processing trims blanks off the offsets, and would add tokens that the template writes itself.
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    return tokenizer


# How far the supervision of a text's last message reaches: to the end of its content, to the control token
# right behind it, or (with tool calls) to the end of the turn.
Reach = Literal["content", "token", "turn"]


@dataclass(frozen=True)
class _Text:
    """A text between two control tokens, with the supervised (start, end) in it, rising."""

    text: str
    spans: list[tuple[int, int]]
    reach: Reach


def _begins_inside(offsets: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that begins inside a span; both rise, so one pass is enough."""
    mask, at = [], 0
    for start, _ in offsets:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        mask.append(int(at < len(spans) and start >= spans[at][0]))
    return mask


class _Signs:
    """Private-use characters that stand for look-alikes of control tokens and mark where contents lie.

    They are taken from those that the conversation does not use: one for each look-alike, and one for the
    marks. With `|` for it, message 3 is marked as `|3|content||`.
    """

    def __init__(self, messages: Messages, tools: Tools, control: re.Pattern[str]) -> None:
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise ChatError(
                    f"a message of role {message.get('role')} has content of type "
                    f"{type(message.get('content')).__name__}; expected text"
                )
        used = set(canonical_json([messages, tools]))
        self._unused = (sign for code in range(0xF0000, 0x10FFFE) if (sign := chr(code)) not in used)
        self._control = control
        self._sign_of: dict[str, str] = {}
        self.messages: list[dict[str, Any]] = self._without_lookalikes(messages)
        self.tools = self._without_lookalikes(tools) if tools else None
        self._lookalikes = str.maketrans({sign: text for text, sign in self._sign_of.items()})
        self._edge = next(self._unused)
        self._mark = re.compile(f"{self._edge}([0-9]*){self._edge}")

    @property
    def has_lookalikes(self) -> bool:
        """Whether any text of the conversation holds the letters of a control token."""
        return bool(self._sign_of)

    def _without_lookalikes(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(self._hide, value)
        if isinstance(value, dict):
            return {
                self._without_lookalikes(key): self._without_lookalikes(inner) for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._without_lookalikes(inner) for inner in value]
        return value

    def _hide(self, found: re.Match[str]) -> str:
        if found.group() not in self._sign_of:
            self._sign_of[found.group()] = next(self._unused)
        return self._sign_of[found.group()]

    def marked(self, trim: bool) -> list[dict[str, Any]]:
        """The messages with marks around their contents."""
        edge = self._edge
        return [
            {**message, "content": f"{edge}{number}{edge}{content}{edge}{edge}"}
            for number, (message, content) in enumerate(zip(self.messages, self._contents(trim), strict=True))
        ]

    def _contents(self, trim: bool) -> list[str]:
        return [message["content"].strip() if trim else message["content"] for message in self.messages]

    def removed(self, rendered: str) -> str:
        """The rendered text without marks."""
        return self._mark.sub("", rendered)

    def all_there(self, rendered: str, trim: bool) -> bool:
        """Whether each content stands in the rendered text once, whole, between its marks."""
        pieces = self._mark.split(rendered)
        between = zip(pieces[1::2], pieces[2::2], pieces[3::2], strict=False)
        found = {mark: [content, end] for mark, content, end in between if mark}
        return len(pieces) == 1 + 4 * len(self.messages) and found == {
            str(number): [content, ""] for number, content in enumerate(self._contents(trim))
        }

    def read(self, part: str, supervised: frozenset[int]) -> _Text:
        """A piece of the rendered text as it is to be encoded, and what of it is supervised."""
        pieces = self._mark.split(part)
        texts = [text.translate(self._lookalikes) for text in pieces[::2]]
        spans: list[tuple[int, int]] = []
        reach: Reach = "content"
        length = 0
        for text, mark in zip(texts, ["", *pieces[1::2]], strict=True):
            if mark and int(mark) in supervised:
                spans.append((length, length + len(text)))
                reach = "turn" if self.messages[int(mark)].get("tool_calls") else "token"
            elif text and reach == "token":
                reach = "content"
            length += len(text)
        if reach == "turn":
            spans[-1] = (spans[-1][0], length)
        return _Text("".join(texts), spans, reach)
