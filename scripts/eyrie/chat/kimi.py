"""What is Kimi's own: K2, K2-Thinking and K2.5 have one vocabulary and one format of turns.

    <|im_user|>user<|im_middle|>...<|im_end|><|im_assistant|>assistant<|im_middle|><think>R</think>A<|im_end|>

Their template empties the thinking of the last finished answer and of all before it, so that a finished
conversation as it renders it holds no thinking at all, and not what the model saw while it called tools.
Where that makes a difference, what was generated is put behind its own prompt instead, part by part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyrie.config import ConfigError
from eyrie.records import read_json

# The later Kimi K3 has the same ids for other tokens, which would mask the wrong ones without a word.
IDS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<think>": 163606,
    "</think>": 163607,
}
END = "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"

_CALL_ID = re.compile(r"functions\.[^\s:]+:[0-9]+")


def is_kimi(path: Path) -> bool:
    """Whether a target's folder holds a Kimi with its own tokenizer."""
    settings = path / "tokenizer_config.json"
    if (path / "tokenizer.json").exists() or not settings.exists():
        return False
    return read_json(settings).get("tokenizer_class") == "TikTokenTokenizer"


def check_ids(control_ids: Mapping[str, int], path: Path) -> None:
    """Raise ConfigError where the control tokens are not those of K2 to K2.5."""
    may_lack = set() if THINK in control_ids else {THINK, THINK_END}
    wrong = [
        f"{token} {control_ids.get(token)} (expected {number})"
        for token, number in IDS.items()
        if control_ids.get(token) != number and token not in may_lack
    ]
    if wrong:
        raise ConfigError(
            f"{path}: the tokenizer is Kimi's by its class, but its control tokens are others than those of "
            f"K2, K2-Thinking and K2.5: {', '.join(wrong)}. Take one of these, or a target with a "
            "tokenizer.json"
        )


def answer_text(message: Mapping[str, Any], prompt: str) -> str:
    """What the model generates after a prompt to give this message, its control tokens as their letters.

    K2.5's prompt opens the thinking, or closes it at once where none is wanted; K2-Thinking's does neither.
    """
    thought = f"{THINK}{message.get('reasoning_content', '')}{THINK_END}"
    for opened in (THINK + THINK_END, THINK):
        if prompt.endswith(opened):
            thought = thought.removeprefix(opened)
            break
    return f"{thought}{message['content']}{_calls(message)}{END}"


def _calls(message: Mapping[str, Any]) -> str:
    if not message.get("tool_calls"):
        return ""
    calls = "".join(
        f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{call['function']['arguments']}"
        "<|tool_call_end|>"
        for call in message["tool_calls"]
    )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of calls in Kimi's form, functions.NAME:NUMBER, counted through the conversation.

    The id stands for the name in the text. Results follow their call's id, or where they have none the order
    of the calls.
    """
    number = 0
    renamed: dict[str, str] = {}
    waiting: list[str] = []
    result = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                own = f"functions.{call['function']['name']}:{number}"
                number += 1
                given = call.get("id") or ""
                new = given if _CALL_ID.fullmatch(given) else own
                renamed[given] = new
                waiting.append(new)
                calls.append(call | {"id": new})
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id") or ""
            new = renamed.get(given, given) if given else waiting[0] if waiting else ""
            if new in waiting:
                waiting.remove(new)
            message = message | {"tool_call_id": new}
        result.append(message)
    return result
