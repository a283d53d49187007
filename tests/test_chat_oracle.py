"""The linear way of making rows against re-encoding every prefix, which is too slow for anything but tests.

The oracle renders the conversation anew before and after each turn, and encodes each of these texts from its
beginning; it looks for nothing inside a text. Only what stands between a prompt's end and a turn's end counts
as generated, and what is generated is encoded apart from its prompt.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import chat_targets
from eyrie.chat import ChatRow

FAST_TESTS = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
TARGETS = ["chatml", "trimming", "thinking", "kimi"]
WITH_TOOLS = {"trimming", "thinking", "kimi"}
WITH_REASONING = {"thinking", "kimi"}
END = {"chatml": "<|im_end|>", "trimming": "<|eot_id|>", "thinking": "<|im_end|>", "kimi": "<|im_end|>"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

PIECES = [
    "",
    " ",
    "\n",
    "\n\n",
    "\t",
    "a",
    "word",
    " the",
    "x\n",
    "  y",
    "你好",
    "世",
    "😀",
    "👩‍👩‍👧",
    "é",
    ".",
    "'s",
]
PIECES += ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|im_assistant|>", "\U000f0000", "\x85"]
CALL_PIECES = ["a", " b", "你", "\n", '"', "<|im_end|>", "<|tool_call_end|>"]


def texts(pieces: list[str], least: int = 0) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), min_size=least, max_size=5).map("".join)


class Oracle:
    """Rows by quadratic work, through the tokenizer's and the template's own front doors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokenizer = chat_targets.chat(name).tokenizer
        added = (
            self.tokenizer.special_tokens
            if name == "kimi"
            else {t.content: n for n, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        )
        self.control = dict(added)
        self.pattern = re.compile("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")")
        self.escapes = {token: chr(0x100000 + at) for at, token in enumerate(sorted(added))}

    def escape(self, value: Any) -> Any:
        """Control tokens' letters in the conversation as other characters, so that none is in the way."""
        text = json.dumps(value, ensure_ascii=False)
        return json.loads(self.pattern.sub(lambda found: self.escapes[found.group()], text))

    def render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False, **more: Any) -> str:
        given = copy.deepcopy(messages)
        for message in given:
            if "reasoning_content" in message:
                message.update(dict.fromkeys(REASONING_KEYS, message["reasoning_content"]))
            if self.name == "trimming":
                for call in message.get("tool_calls", []):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return self.tokenizer.apply_chat_template(
            given, tools=tools, tokenize=False, add_generation_prompt=prompt, **more
        )

    def encode(self, text: str, seams: list[int]) -> list[int]:
        """A text from its beginning, in parts that end at the seams before its end."""
        edges = [0, *(seam for seam in seams if seam < len(text)), len(text)]
        return [number for a, b in pairwise(edges) for number in self._part(text[a:b])]

    def _part(self, text: str) -> Iterator[int]:
        for piece in self.pattern.split(text):
            if piece in self.control:
                yield self.control[piece]
                continue
            for token, sign in self.escapes.items():
                piece = piece.replace(sign, token)
            if self.name == "kimi":
                yield from self.tokenizer.encode(piece, allow_special_tokens=False)
            else:
                yield from self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True)[
                    "input_ids"
                ]

    def turn(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, int, int]:
        """What is rendered just after the last message's turn, where it was asked for and where it ends."""
        before, message = messages[:-1], messages[-1]
        text, asked = self.render(messages, tools), self.render(before, tools, prompt=True)
        if "reasoning_content" not in message:
            quiet = self.render(before, tools, prompt=True, enable_thinking=False, thinking=False)
            asked = quiet if self.name == "kimi" or text.startswith(quiet) else asked
        if self.name == "kimi" and not text.startswith(asked):
            text = f"{asked}{self.said(message)}"
        if self.name == "kimi" and "reasoning_content" in message:
            text = f"{asked}{message['reasoning_content']}</think>{self.said(message)}"
        assert text.startswith(asked)
        end = END[self.name]
        return text, len(asked), text.rindex(end) + len(end)

    def shows_reasoning(self, messages: list[dict[str, Any]], tools: Any, number: int) -> bool:
        other = copy.deepcopy(messages)
        other[number]["reasoning_content"] = "something else"
        return self.render(messages, tools) != self.render(other, tools)

    @staticmethod
    def said(message: dict[str, Any]) -> str:
        """Kimi's own form of content and calls."""
        calls = [
            f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{call['function']['arguments']}"
            "<|tool_call_end|>"
            for call in message.get("tool_calls", [])
        ]
        section = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
        return message["content"] + "".join(calls and [section[0], *calls, section[1]]) + "<|im_end|>"

    def rows(self, messages: list[dict[str, Any]], tools: Any) -> list[ChatRow]:
        messages, tools = self.escape(messages), self.escape(tools)
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        whole = self.render(messages, tools)
        turns = [self.turn(messages[: number + 1], tools) for number in numbers]
        kept = all(
            whole.startswith(self.render(messages[: number + 1], tools))
            and ("reasoning_content" not in messages[number] or self.shows_reasoning(messages, tools, number))
            for number in numbers
        )
        if kept:
            return [self.row(whole, [(start, end) for _, start, end in turns], None)]
        rows = []
        for number, (text, start, end) in enumerate(turns):
            rows.append(self.row(text, [(start, end)], number if len(turns) > 1 else None))
        return rows

    def row(self, text: str, spans: list[tuple[int, int]], turn: int | None) -> ChatRow:
        seams = [edge for span in spans for edge in span]
        ids = self.encode(text, seams)
        mask = [0] * len(ids)
        for start, end in spans:
            prompt, answered = self.encode(text[:start], seams), self.encode(text[:end], seams)
            assert ids[: len(prompt)] == prompt and ids[: len(answered)] == answered
            mask[len(prompt) : len(answered)] = [1] * (len(answered) - len(prompt))
        return ChatRow(ids, mask, turn)


@st.composite
def conversations(draw: st.DrawFn, name: str) -> tuple[list[dict[str, Any]], Any]:
    """A conversation as the layouts give it, with a tool loop now and then."""
    calls = 0

    def answer(with_calls: bool) -> dict[str, Any]:
        nonlocal calls
        message = {"role": "assistant", "content": draw(texts(PIECES))}
        if name in WITH_REASONING and draw(st.booleans()):
            message["reasoning_content"] = draw(texts(PIECES)) + draw(st.sampled_from(["so", " R\n", "想"]))
        if with_calls:
            # One of the templates has no place for words beside a call.
            message["content"] = "" if name == "trimming" else message["content"]
            message["tool_calls"] = []
            for _ in range(draw(st.integers(1, 2))):
                arguments = json.dumps({"q": draw(texts(CALL_PIECES))}, ensure_ascii=draw(st.booleans()))
                function = {"name": "look_up", "arguments": arguments}
                message["tool_calls"].append(
                    {"type": "function", "id": f"functions.look_up:{calls}", "function": function}
                )
                calls += 1
        return message

    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts(PIECES))})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts([*PIECES, "<think>", "</think>"]))})
        for _ in range(draw(st.integers(0, 2)) if name in WITH_TOOLS else 0):
            asking = answer(with_calls=True)
            messages.append(asking)
            messages += [
                {"role": "tool", "content": draw(texts(PIECES)), "tool_call_id": call["id"]}
                for call in asking["tool_calls"]
            ]
        messages.append(answer(with_calls=False))
    if draw(st.integers(0, 3)) == 0:
        messages.pop()
    tools = [{"type": "function", "function": {"name": "look_up", "description": draw(texts(PIECES))}}]
    return messages, tools if name in WITH_TOOLS and draw(st.booleans()) else None


@pytest.mark.parametrize("name", TARGETS)
def test_linear_rows_are_the_quadratic_ones(name: str) -> None:
    oracle, chat = Oracle(name), chat_targets.chat(name)

    @FAST_TESTS
    @given(conversations(name))
    def check(conversation: tuple[list[dict[str, Any]], Any]) -> None:
        messages, tools = conversation
        rows = chat.rows(messages, tools)
        assert rows == oracle.rows(messages, tools)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_a_turns_row_begins_with_the_prompt_that_asks_for_it(name: str) -> None:
    chat = chat_targets.chat(name)

    @FAST_TESTS
    @given(conversations(name))
    def check(conversation: tuple[list[dict[str, Any]], Any]) -> None:
        messages, tools = conversation
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        for at, row in enumerate(chat.rows(messages, tools)):
            if 1 not in row.loss_mask:
                continue
            asked = chat.prompt_ids(messages[: numbers[at]], tools)
            given_ids = row.ids[: row.loss_mask.index(1)]
            # Where nothing was thought, the prompt closes the thinking at once.
            assert given_ids[: len(asked)] == asked or "reasoning_content" not in messages[numbers[at]]

    check()
