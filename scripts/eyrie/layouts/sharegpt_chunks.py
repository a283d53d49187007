"""Shared chats scraped from web pages and cut into chunks (ShareGPT V3 and its kin).

    {"id": "QWx3_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}

Long chats were split: the id's last number counts the chunks, and all but the first lack what they answer.
Human turns carry remnants of the page: tags, entities, and the label of a copy button above each code block.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, SkipRow, column, entry, message, refuse_media, turns_column

COLUMNS = ("id", "conversations")
OPTIONAL = ()
EXPECTED = "a column `id` that ends in _<chunk> and a column `conversations` with a list of {from, value}"

_CHUNK = re.compile(r"_(\d+)$")
_FENCED = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]+`)", re.DOTALL)
# Only names of HTML elements, so that List<int> and <|im_end|> stay.
_TAG = re.compile(
    r"</?(?:a|article|b|blockquote|br|button|code|div|em|font|form|h[1-6]|hr|i|img|input|li|ol|p|path|pre|script"
    r"|section|span|strong|style|sub|sup|svg|table|tbody|td|textarea|th|thead|tr|u|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_COPY_LABEL = re.compile(r"^[\w+#.-]{0,20}Copy code[ \t]*(?:\n|$)", re.MULTILINE)


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The turns of a first chunk, the human ones cleaned."""
    refuse_media(row)
    turns = turns_column(row, fields.get("conversations", "conversations"))
    if not turns:
        raise SkipRow("empty_conversation")
    name = fields.get("id", "id")
    row_id = column(row, name)
    if not isinstance(row_id, str):
        raise SkipRow(f"bad_type:{name}")
    chunk = _CHUNK.search(row_id)
    if chunk is not None and int(chunk[1]) != 0:
        raise SkipRow("not_first_chunk")
    messages = [message(entry(turn, "from"), entry(turn, "value")) for turn in turns]
    for made in messages:
        if made["role"] == "user":
            made["content"] = without_page_remnants(made["content"])
    return Conversation(messages)


def without_page_remnants(text: str) -> str:
    """The text without copy-button labels and, outside of code, without tags and entities.

    Tags go before entities are resolved: &lt;p&gt; was text that the user wrote, <p> was the page's.
    """
    pieces = _FENCED.split(_COPY_LABEL.sub("", text))
    # Splitting by one group leaves the code at the odd places.
    pieces[::2] = [html.unescape(_TAG.sub("", piece)) for piece in pieces[::2]]
    return "".join(pieces)
