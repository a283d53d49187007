"""From one answer to the next: a conversation whose answers stand for those that the target will give.

A conversation of several turns is kept as the tokens that the target read and generated. What comes between
two answers (the end of the turn, the next question, the generation prompt) is cut out of what the template
makes of this conversation; the target's own answers never go through it. So they stay in the history as they
were generated, reasoning and tool calls included. A template may rewrite its history and strip the reasoning
of earlier turns, and a server that renders every request anew shows the target such a history; here the
tokens win, since a prompt that begins with all tokens before it makes one sample and is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from eyrie.chat.marks import Messages

_ANSWER = {"role": "assistant", "content": "So."}


class Answered(NamedTuple):
    """All turns of a conversation, a stand-in behind each but the last, and where the last stand-in is."""

    messages: list[dict[str, Any]]
    answer: int


def answered(history: Sequence[Messages], following: Messages) -> Iterator[Answered]:
    """The turns so far and the following one, with answers that a template may take, the likeliest first.

    Results of tools follow calls, as many as there are results. Where the template has no place for calls,
    they follow words.
    """
    turns = [*history, following]
    has_results = any(message["role"] == "tool" for turn in turns[1:] for message in turn)
    for with_calls in (True, False) if has_results else (False,):
        messages: list[dict[str, Any]] = []
        for turn, then in pairwise(turns):
            messages += [*turn, _answer(then) if with_calls else _ANSWER]
        yield Answered([*messages, *following], len(messages) - 1)


def _answer(then: Messages) -> dict[str, Any]:
    """A stand-in for the answer before a turn."""
    calls = [_call(message) for message in then if message["role"] == "tool"]
    return {**_ANSWER, "content": "", "tool_calls": calls} if calls else _ANSWER


def _call(result: dict[str, Any]) -> dict[str, Any]:
    """The call that a result answers, as far as the result tells."""
    call_id = result.get("tool_call_id") or ""
    function = {"name": result.get("name") or "tool", "arguments": "{}"}
    return {"type": "function", "id": call_id, "function": function}
