"""What a conversation can be refused for."""

from __future__ import annotations

from typing import Literal

from eyrie.records import RecordError

Reason = Literal[
    "template_error",
    "content_lost",
    "tool_calls_lost",
    "reasoning_lost",
    "reasoning_unclear",
    "no_end_of_turn",
    "foreign_token_id",
]


class ChatError(RecordError):
    """A conversation that the target's template or tokenizer can't take.

    The message says why; `reason` is the word for it in a ledger.
    """

    def __init__(self, words: str, reason: Reason = "template_error") -> None:
        super().__init__(words)
        self.reason: Reason = reason
