"""A prompt with its replies, and theirs below them (Open Assistant).

    {"message_tree_id": "t1", "prompt": {"text": "Hi", "role": "prompter", "replies": [
        {"text": "Hello", "role": "assistant", "rank": 0, "replies": []}]}}

Of the replies to a message the one of the lowest rank is followed, the first where none is ranked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, Message, SkipRow, column, entry, message, refuse_media

COLUMNS = ("prompt",)
OPTIONAL = ()
EXPECTED = "a column `prompt` with {text, role, replies}, the replies of the same shape"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The path of the best replies, from the prompt to its end."""
    refuse_media(row)
    name = fields.get("prompt", "prompt")
    node = column(row, name)
    messages: list[Message] = []
    while node is not None:
        if not isinstance(node, Mapping):
            raise SkipRow(f"bad_type:{name}")
        messages.append(message(entry(node, "role"), entry(node, "text")))
        node = _best(node.get("replies") or [], name)
    return Conversation(messages)


def _best(replies: Any, name: str) -> Any:
    if not isinstance(replies, list) or not all(isinstance(reply, Mapping) for reply in replies):
        raise SkipRow(f"bad_type:{name}")
    standing = [reply for reply in replies if not reply.get("deleted")]
    return min(standing, key=_rank, default=None)


def _rank(reply: Mapping[str, Any]) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")
