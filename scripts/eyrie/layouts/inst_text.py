"""A whole chat in one text, its questions between [INST] and [/INST] (Llama 2, Mistral).

{"text": "<s>[INST] <<SYS>>\\nBe brief\\n<</SYS>>\\n\\nHi [/INST] Hello </s><s>[INST] Bye [/INST] Bye </s>"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, Message, SkipRow, refuse_media, whole_text

COLUMNS = ("text",)
OPTIONAL = ()
EXPECTED = "a column `text` with questions between [INST] and [/INST]"

_MARK = re.compile(r"(\[/?INST\])")
_SYSTEM = re.compile(r"\A\s*<<SYS>>(.*?)<</SYS>>", re.DOTALL)
_BEGIN, _END = "<s>", "</s>"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The text's turns; marks that do not alternate show that one of them was somebody's words."""
    refuse_media(row)
    name = fields.get("text", "text")
    before, *pieces = _MARK.split(whole_text(row, name))
    if not pieces and before.strip():
        raise SkipRow(f"bad_type:{name}")
    if any(mark != ("[INST]", "[/INST]")[place % 2] for place, mark in enumerate(pieces[::2])):
        raise SkipRow("damaged_turns")
    if before.strip().removeprefix(_BEGIN).strip() or len(pieces) % 4:
        raise SkipRow("damaged_turns")
    messages: list[Message] = []
    for question, answer in zip(pieces[1::4], pieces[3::4], strict=True):
        system = _SYSTEM.match(question) if not messages else None
        if system is not None:
            messages.append({"role": "system", "content": system[1].strip()})
            question = question[system.end() :]
        messages.append({"role": "user", "content": question.strip()})
        words = answer.strip().removesuffix(_BEGIN).rstrip().removesuffix(_END).strip()
        if words:
            messages.append({"role": "assistant", "content": words})
    return Conversation(messages)
