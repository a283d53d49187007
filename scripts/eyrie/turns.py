"""A row of prompts.jsonl as turns: the first prompt, the prompt after each answer, and all as one sample.

The sequence only grows: prompt, answer, what the template puts between, answer, and so on. Nothing that was
read or generated is rendered or encoded again, so each prompt begins with all tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyrie.chat import Chat
from eyrie.chat.marks import Messages
from eyrie.records import RecordError


class Dialogue:
    """The turns of one row, asked of one target."""

    def __init__(self, chat: Chat, row: Mapping[str, Any]) -> None:
        """row: of prompts.jsonl; without `turns` it is one turn. Raises RecordError where they differ."""
        self._chat = chat
        self._tools = row.get("tools")
        self._turns = list(_turns(row))

    def __len__(self) -> int:
        """How many answers are asked for."""
        return len(self._turns)

    def first_prompt(self) -> list[int]:
        """The ids that ask for the first answer. Raises ChatError."""
        return self._chat.prompt_ids(self._turns[0], self._tools)

    def next_prompt(
        self, ids_so_far: Sequence[int], answer_ids: Sequence[int], turn: int
    ) -> list[int] | None:
        """The ids that ask for the answer after that of `turn`, which counts from 0; None after the last one.

        ids_so_far: the prompt of that turn. answer_ids: what was generated, with its end token if it has one.
        Raises ChatError where the template refuses what follows.
        """
        if turn + 1 >= len(self._turns):
            return None
        return [*ids_so_far, *answer_ids, *self._between(answer_ids, turn)]

    def sample(self, answers: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The ids up to the end of the last answer, and the mask with 1 for each id that was generated.

        answers: the ids of the first answers, at least one of them.
        """
        ids = self.first_prompt()
        mask = [0] * len(ids)
        for turn, answer_ids in enumerate(answers):
            if turn > 0:
                between = self._between(answers[turn - 1], turn - 1)
                ids += between
                mask += [0] * len(between)
            ids += answer_ids
            mask += [1] * len(answer_ids)
        return ids, mask

    def _between(self, answer_ids: Sequence[int], turn: int) -> list[int]:
        """What stands between the answer of a turn and the next."""
        history, following = self._turns[: turn + 1], self._turns[turn + 1]
        last_id = answer_ids[-1] if answer_ids else None
        return self._chat.continuation_ids(history, following, self._tools, last_id)


def _turns(row: Mapping[str, Any]) -> Iterator[Messages]:
    messages, at = row["messages"], 0
    lengths = row.get("turns", [len(messages)])
    if sum(lengths) != len(messages) or min(lengths, default=0) < 1:
        raise RecordError(
            f"row {row['id']}: turns of {lengths} messages do not make the {len(messages)} that it has; "
            "expected the rows that scripts/build_prompts.py writes"
        )
    for length in lengths:
        yield messages[at : at + length]
        at += length
