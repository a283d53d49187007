"""Speculative decoding replayed over answers that are there already: which cycles a decoder would make.

Every place of an answer has the probabilities that the first, the first two, ... tokens drafted there are
accepted; 0 or 1 where drafts are greedy. A decoder begins at the answer's first token, and a cycle that
accepts n tokens leads it n + 1 places on, so each place has a probability that a cycle begins there. All
figures weigh places by it. To weigh all places alike counts the easy ones within accepted drafts, which a
decoder jumps over: it overstates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from eyrie.bootstrap import Floats

Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Answer:
    """Tokens `start` to `end` - 1 of a sample, which the target wrote in one go.

    limit: how many tokens a decoder may write there; None: it ends by itself, and nothing cuts it.
    """

    start: int
    end: int
    limit: int | None

    @property
    def places(self) -> Integers:
        """The places of the answer after which more of it follows: 0 is its first token.

        A place stands for a cycle that begins with that token as the newest.
        """
        # A drafter needs a feature before the newest token, which a sample's first token lacks.
        return np.arange(0 if self.start else 1, self.end - self.start - 1)

    @property
    def positions(self) -> Integers:
        """The drafter's position at each place, one before the newest token's."""
        return self.start + self.places - 1

    def full(self, draft_tokens: int) -> Booleans:
        """At which places a decoder would be offered that many drafts: they and its own token find room."""
        if self.limit is None:
            return np.ones(len(self.places), dtype=bool)
        return self.places + draft_tokens + 2 <= self.limit

    def within(self, rates: Floats) -> Floats:
        """Rates [places, draft_tokens] of tokens after the place, 0 where they lie past the answer's end."""
        after = self.places[:, None] + np.arange(1, rates.shape[1] + 1)
        return np.where(after < self.end - self.start, rates, 0.0)


def find_answers(
    token_ids: Sequence[int], loss_mask: Sequence[int], eos_ids: Sequence[int], limit: int | None = None
) -> list[Answer]:
    """The answers of a sample: its runs of supervised tokens, each cut after `limit` tokens.

    One that does not end with an end-of-sequence token was cut where it ends.
    """
    answers, start = [], 0
    for supervised, run in groupby(map(bool, loss_mask)):
        length = sum(1 for _ in run)
        if supervised:
            kept = length if limit is None else min(length, limit)
            ended = token_ids[start + kept - 1] in eos_ids
            answers.append(Answer(start, start + kept, limit if ended else kept))
        start += length
    return answers


def visits(joint: Floats, full: Booleans) -> Floats:
    """With what probability a decoder makes a full cycle at each place [N]; it begins at the first.

    joint [N, K]: how probable it is that the first 1, 2, ..., K drafts are accepted, each at most the one
    before. full [N]: see Answer.full.
    """
    places, drafts = joint.shape
    bounds = np.concatenate([np.ones((places, 1)), joint, np.zeros((places, 1))], axis=1)
    exactly = bounds[:, :-1] - bounds[:, 1:]
    reached = np.zeros(places + drafts + 1)
    reached[:1] = 1.0
    for place in range(places):
        if reached[place]:
            reached[place + 1 : place + drafts + 2] += reached[place] * exactly[place]
    return reached[:places] * full
