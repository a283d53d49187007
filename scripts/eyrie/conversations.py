"""Conversations whose turns are asked one after the other, each on the target's own answers before it.

A conversation is known by its first prompt; what is asked next follows from what was answered. Answers are
looked up by the hash of all tokens that ask for them, so an answer that is there is never asked for again,
and conversations that begin alike share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyrie.engines import Answered, Prompt
from eyrie.records import content_key
from eyrie.turns import Dialogue


@dataclass(frozen=True)
class Turn:
    """One question: the ids that ask it, their hash, and the store's row of the answer if there is one."""

    number: int
    """From 0."""
    key: str
    ids: Sequence[int]
    answer: Mapping[str, Any] | None


@dataclass(frozen=True)
class Conversation:
    """A row of prompts.jsonl: the token ids of its first prompt, and what asks the rest.

    dialogue: None where there is one turn only. longest: a prompt of more tokens is not asked.
    """

    id: str
    group: str
    ids: Sequence[int]
    key: str
    dialogue: Dialogue | None
    longest: int

    def __len__(self) -> int:
        """How many turns it has."""
        return 1 if self.dialogue is None else len(self.dialogue)

    def turns(self, answers: Mapping[str, Mapping[str, Any]]) -> Iterator[Turn]:
        """The turns that can be asked, given the answers by key: all but the last one are answered.

        It ends early after an answer that was cut, which nobody could reply to, and before a prompt that is
        too long.
        """
        key, ids = self.key, self.ids
        for number in range(len(self)):
            answer = answers.get(key)
            yield Turn(number, key, ids, answer)
            following = None if answer is None else self.following(number, ids, answer)
            if following is None:
                return
            key, ids = following

    def open_turn(self, answers: Mapping[str, Mapping[str, Any]]) -> Turn | None:
        """The turn that is to be asked next; None where there is none. A single turn's answer is not read."""
        if self.dialogue is None:
            return None if self.key in answers else Turn(0, self.key, self.ids, None)
        *_, last = self.turns(answers)
        return last if last.answer is None else None

    def following(self, number: int, ids: Sequence[int], answer: Mapping[str, Any]) -> Prompt | None:
        """The prompt after the answer to turn `number`, which `ids` asked; None where it ends."""
        if self.dialogue is None or answer["finish_reason"] != "stop":
            return None
        following = self.dialogue.next_prompt(ids, answer["token_ids"], number)
        if following is None or len(following) > self.longest:
            return None
        return content_key(following), following

    def sample(self, answers: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        """Token ids and loss mask of the whole, with the answers to its first turns."""
        ids = [answer["token_ids"] for answer in answers]
        if self.dialogue is None:
            return [*self.ids, *ids[0]], [0] * len(self.ids) + [1] * len(ids[0])
        return self.dialogue.sample(ids)


class Followers:
    """What to ask next as answers come: hands an engine the next turn of a conversation at once."""

    def __init__(
        self, conversations: Iterable[Conversation], answers: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._waiting: dict[str, list[tuple[Conversation, int, Sequence[int]]]] = defaultdict(list)
        for conversation in conversations:
            if conversation.dialogue is not None and (turn := conversation.open_turn(answers)) is not None:
                self._waiting[turn.key].append((conversation, turn.number, turn.ids))

    def __call__(self, answered: Answered) -> Prompt | None:
        """The next prompt after this answer; of several conversations that waited for it, the first one's."""
        answer = {"token_ids": answered.token_ids, "finish_reason": answered.finish_reason}
        for conversation, number, ids in self._waiting.pop(answered.key, []):
            following = conversation.following(number, ids, answer)
            if following is not None:
                self._waiting[following[0]].append((conversation, number + 1, following[1]))
                return following
        return None
