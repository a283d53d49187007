"""Instruction, input and response in one text, each under its heading (rendered Alpaca).

    {"text": "Below is an instruction ...\\n### Instruction:\\nAdd.\\n### Input:\\n1, 2\\n### Response:\\n3"}

Words before the first heading tell the model what follows and are no part of the chat. Instruction and input
are joined by an empty line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, Message, SkipRow, refuse_media, whole_text

COLUMNS = ("text",)
OPTIONAL = ()
EXPECTED = "a column `text` with lines ### Instruction:, perhaps ### Input:, and ### Response:"

_HEADING = re.compile(r"(?:\A|\n)### ?(Instruction|Input|Response|Output):[ \t]*")
_AFTER = {
    "": {"Instruction"},
    "Instruction": {"Input", "Response", "Output"},
    "Input": {"Response", "Output"},
    "Response": {"Instruction"},
    "Output": {"Instruction"},
}


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The text's turns; headings out of order show that one of them was somebody's words."""
    refuse_media(row)
    name = fields.get("text", "text")
    text = whole_text(row, name)
    _, *pieces = _HEADING.split(text)
    if not pieces and text.strip():
        raise SkipRow(f"bad_type:{name}")
    messages: list[Message] = []
    last = ""
    for heading, words in zip(pieces[::2], pieces[1::2], strict=True):
        if heading not in _AFTER[last]:
            raise SkipRow("damaged_turns")
        words = words.removesuffix("</s>").removesuffix("<|endoftext|>").strip()
        if heading == "Input":
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{words}".strip()
        elif heading == "Instruction" or words:
            messages.append({"role": "user" if heading == "Instruction" else "assistant", "content": words})
        last = heading
    return Conversation(messages)
