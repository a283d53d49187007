"""The target's distribution over the draft vocabulary, cut to its likeliest tokens, from the last state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from eyrie.encoding import States, TopTokens
from eyrie.records import content_key

# States and rows of the head that are multiplied at once. With the logits over the draft vocabulary, which
# are kept until they are sorted, that is all that exists of the logits.
_STATES = 512
_HEAD_ROWS = 8192


class Likeliest:
    """Makes TopTokens of last states.

    head: reads the target's head [V, H], when it is first needed. draft_ids: the draft vocabulary, rising
    target ids. k: how many tokens to keep.
    """

    def __init__(self, head: Callable[[], torch.Tensor], draft_ids: Sequence[int], k: int) -> None:
        self._read_head = head
        self._draft_ids = torch.tensor(draft_ids, dtype=torch.int64)
        self._k = min(k, len(draft_ids))

    @property
    def draft_vocab_size(self) -> int:
        """Tokens of the draft vocabulary."""
        return len(self._draft_ids)

    @cached_property
    def _head(self) -> torch.Tensor:
        return self._read_head()

    def shorten(self, states: States) -> States:
        """The states with their distribution in place of the last state."""
        assert states.last is not None
        return States(states.token_ids, states.aux, top=self.of(states.last))

    @torch.inference_mode()
    def of(self, last: torch.Tensor) -> TopTokens:
        """The distribution after each of the states [T, H], in float32 sums."""
        parts = [self._of_part(part) for part in torch.split(last, _STATES)]
        ids, logs, rest, choices = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return TopTokens(ids, logs, rest, choices)

    def _of_part(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, choices = self._draft_logits(last.float())
        logs = logits.log_softmax(dim=-1)
        top, ids = _ranked(logs, self._k)
        # Summed without the top ones rather than taken from one: that would round to nothing.
        rest = logs.exp_().scatter_(1, ids, 0.0).sum(dim=-1)
        smallest = torch.finfo(torch.float16).min
        return ids.int(), top.clamp(min=smallest).half(), rest, choices.int()

    def _draft_logits(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [T, D] over the draft vocabulary, and the likeliest id [T] of the whole vocabulary."""
        logits = last.new_empty(len(last), len(self._draft_ids))
        best = last.new_full((len(last),), -torch.inf)
        choices = torch.zeros(len(last), dtype=torch.int64)
        for start, rows in enumerate(torch.split(self._head, _HEAD_ROWS)):
            first = start * _HEAD_ROWS
            piece = last @ rows.float().t()
            value, index = piece.max(dim=-1)
            # Strictly greater: of equal logits the lowest id counts.
            better = value > best
            best = torch.where(better, value, best)
            choices = torch.where(better, index + first, choices)
            bounds = torch.tensor([first, first + len(rows)])
            low, high = torch.searchsorted(self._draft_ids, bounds).tolist()
            logits[:, low:high] = piece[:, self._draft_ids[low:high] - first]
        return logits, choices


def _ranked(logs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their places, largest first, the lowest place first among equals."""
    # One more than wanted shows where equals lie across the border: there topk takes any of them.
    values, places = logs.topk(min(k + 1, logs.shape[1]), dim=-1)
    if k < logs.shape[1]:
        unclear = values[:, k - 1] == values[:, k]
        ordered = logs[unclear].sort(dim=-1, descending=True, stable=True)
        values[unclear], places[unclear] = ordered.values[:, : k + 1], ordered.indices[:, : k + 1]
    places, order = places[:, :k].sort(dim=-1)
    values, order = values[:, :k].gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, places.gather(1, order)


def vocabulary_digest(draft_ids: Sequence[int]) -> str:
    """What names a draft vocabulary where results depend on it: its ids, in their order, and nothing else."""
    return content_key("draft_vocabulary", list(draft_ids))
