"""What a conversation asks: its prompt or its turns, their identity, and which conversations ask nothing."""

from __future__ import annotations

from eyrie.layouts.base import Message, SkipRow
from eyrie.records import content_key, words_key


def check_conversation(messages: list[Message], native: bool) -> str:
    """The prompt of a conversation, which is its first user turn.

    Raises SkipRow where there is none, or in a native conversation no answer.
    """
    if not messages:
        raise SkipRow("empty_conversation")
    spoken = [made for made in messages if made["role"] != "system"]
    if spoken and spoken[0]["role"] == "assistant":
        raise SkipRow("starts_with_assistant")
    questions: list[str] = [made["content"] for made in spoken if made["role"] == "user"]
    prompt = questions[0] if questions else ""
    if not prompt.strip():
        raise SkipRow("empty_prompt" if any(map(str.strip, questions)) else "no_user_turn")
    if native and not any(made["role"] == "assistant" and made["content"].strip() for made in spoken):
        raise SkipRow("no_supervised_text")
    return prompt


def until_last_answer(messages: list[Message]) -> list[Message]:
    """The conversation without the turns that nobody answered."""
    last = max(place for place, made in enumerate(messages) if made["role"] == "assistant")
    return messages[: last + 1]


def asked(messages: list[Message], with_system: bool) -> list[Message]:
    """The first user turn, after the system turn before it where that is wanted and not blank."""
    kept: list[Message] = []
    for made in messages:
        role, content = made["role"], made["content"]
        if role == "user":
            kept.append({"role": role, "content": content})
            break
        if with_system and role == "system" and not kept and content.strip():
            kept.append({"role": role, "content": content})
    return kept


def asked_turns(messages: list[Message], with_system: bool) -> list[list[Message]]:
    """What is asked turn by turn: first what `asked` gives, then what stands behind each answer.

    That is user turns and, as they are, the results of tools; blank user turns and system turns are left out.
    """
    turn = asked(messages, with_system)
    turns = [turn]
    first = next(place for place, made in enumerate(messages) if made["role"] == "user")
    for made in messages[first + 1 :]:
        if made["role"] == "assistant":
            turn = []
        elif made["role"] == "tool" or (made["role"] == "user" and made["content"].strip()):
            if not turn:
                turns.append(turn)
            turn.append(made if made["role"] == "tool" else {"role": "user", "content": made["content"]})
    return turns


def turns_id(messages: list[Message]) -> str:
    """The identity of several turns: their texts, white space aside. A single one's is its prompt_id."""
    texts = [" ".join(made["content"].split()) for made in messages if made["role"] != "system"]
    return content_key("prompt", *texts)


def prompt_id(text: str) -> str:
    """A prompt's identity: its first user turn, white space aside. Answers and system texts play no part."""
    return words_key("prompt", text)
