"""A prompt and perhaps its answer in columns that the configuration names.

    fields: {prompt: problem, response: solution}
    {"problem": "Write a loop.", "solution": "for ..."}

Nothing is guessed: `input` is a prompt in one dataset and only the context of one in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.config import ConfigError
from eyrie.layouts.base import Conversation, refuse_media, text_column

COLUMNS = ("prompt",)
OPTIONAL = ("response", "system")
EXPECTED = "the columns named in `fields`, such as fields: {prompt: problem, response: solution}, with text"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The named columns as turns."""
    if "prompt" not in fields:
        raise ConfigError("layout pairs guesses no column: name it, as in `fields: {prompt: problem}`")
    refuse_media(row)
    messages = [{"role": "user", "content": text_column(row, fields["prompt"])}]
    if "response" in fields:
        messages.append({"role": "assistant", "content": text_column(row, fields["response"])})
    system = text_column(row, fields["system"]) if "system" in fields else ""
    if system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages)
