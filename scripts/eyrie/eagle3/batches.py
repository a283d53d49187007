"""What one optimiser step computes on: which positions are supervised, and how samples are laid side by side.

Supervision is a matter of the token whose last state gives the target's distribution. Call its place q: the
drafter predicts token q + 1 there, at step i from position p = q - 1 - i. So one list of places a sample
says all: step i supervises every place q from which i + 1 steps back is still in the sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eyrie.config import TrainingSettings
from eyrie.store import TopTokens


@dataclass(frozen=True)
class Sample:
    """One tokenized row with its states.

    token_ids: int64 [T]. loss_mask: bool [T]. aux: [T, layers * H], last: [T, H], both in the stored dtype;
    where the last states are not kept, top holds the target's distribution at all T tokens instead.
    candidates: int64 places q that the loss mask supervises. choices: the target's most likely token at
    each of them, over its whole vocabulary.
    """

    key: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor | None
    candidates: torch.Tensor
    choices: torch.Tensor
    top: TopTokens | None = None

    def supervised(self, t2d: torch.Tensor, position_mask: bool = True) -> torch.Tensor:
        """The places with a loss: with a position mask, candidates whose choice the drafter can propose."""
        return self.candidates[t2d[self.choices]] if position_mask else self.candidates


def candidate_places(loss_mask: torch.Tensor, mask_shift: str) -> torch.Tensor:
    """The places q, rising, that a loss mask [T] supervises.

    aligned: those before a supervised token, from token 2 on (token 1 has no feature before it). shifted, as
    in speculators: the mask moves with ids and distributions, so place q is ruled by the mask of token q; an
    answer's first prediction is left out and one past its end is learnt. legacy, as published: ids and
    distributions move left by one and the mask stays, so place q is ruled by the mask of token q - 1; two
    predictions are then left out, and two past the end are learnt.
    """
    places = torch.arange(1, len(loss_mask))
    if mask_shift == "aligned":
        return places[:-1][loss_mask[2:]]
    return places[loss_mask[1:] if mask_shift == "shifted" else loss_mask[:-1]]


def target_choices(last: torch.Tensor, head: torch.Tensor, rows: int = 512) -> Iterator[torch.Tensor]:
    """The most likely token at each state [N, H] under the head [V, H], `rows` states at a time.

    The head is multiplied in pieces, so that a piece of logits is still in the processor's cache when it is
    searched: the whole vocabulary's logits would be read back from memory.
    """
    pieces = [(start, piece.float()) for start, piece in _pieces(head, 8192)]
    for chunk in torch.split(last, rows):
        states = chunk.to(head.device).float()
        best = torch.full((len(states),), -torch.inf, device=head.device)
        choice = torch.zeros(len(states), dtype=torch.int64, device=head.device)
        for start, weight in pieces:
            value, index = (states @ weight.t()).max(dim=-1)
            # Strictly greater: of equal logits the first one counts, as in argmax.
            better = value > best
            best = torch.where(better, value, best)
            choice = torch.where(better, index + start, choice)
        yield choice


def _pieces(matrix: torch.Tensor, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, len(matrix), rows):
        yield start, matrix[start : start + rows]


def plan_steps(counts: Sequence[int], settings: TrainingSettings) -> list[list[list[int]]]:
    """Epochs of steps of sample indices, from the samples' numbers of supervised places.

    Every epoch visits each sample once, in an order of its own, cut into steps of about tokens_per_step
    places each; a longer sample is a step by itself.
    """
    order = torch.Generator().manual_seed(settings.seed)
    sizes = torch.tensor(counts)
    steps = max(1, round(int(sizes.sum()) / settings.tokens_per_step))
    plan = []
    for _ in range(settings.epochs):
        shuffled = torch.randperm(len(counts), generator=order)
        middles = sizes[shuffled].cumsum(0) * 2 - sizes[shuffled]
        step_of = (middles * steps).div(2 * sizes.sum(), rounding_mode="floor").tolist()
        epoch: dict[int, list[int]] = {}
        for index, step in zip(shuffled.tolist(), step_of, strict=True):
            epoch.setdefault(step, []).append(index)
        plan.append(list(epoch.values()))
    return plan


@dataclass(frozen=True)
class Layout:
    """Samples side by side, without padding: their key positions (K in all) and query positions (Q in all).

    Keys are all positions up to a sample's last query; queries are the positions that are followed through
    the steps. Everything else of a sample is never computed.
    """

    aux: torch.Tensor
    """[K, layers * H] float32: captured layers at the key positions."""
    key_positions: torch.Tensor
    """[K]"""
    key_tokens: torch.Tensor
    """[K]: the token after each key position."""
    query_rows: torch.Tensor
    """[Q]: where the queries are among the keys."""
    query_positions: torch.Tensor
    """[Q]"""
    chain_tokens: torch.Tensor
    """[C]: the tokens that the queries meet on their way, each place once."""
    chain_rows: list[torch.Tensor]
    """Step by step, [Q]: which chain token a query takes. Past a sample's end it is token 0."""
    key_counts: list[int]
    """Keys of each sample."""
    query_counts: list[int]
    """Queries of each sample."""


def lay_out(samples: Sequence[Sample], queries: Sequence[torch.Tensor], steps: int) -> Layout:
    """Lay samples side by side, each with its rising, not empty query positions."""
    keys = [int(query[-1]) + 1 for query in queries]
    chain_tokens, chain_rows, query_rows = [], [], []
    key_start = chain_start = 0
    for sample, query, count in zip(samples, queries, keys, strict=True):
        met = query + 1 + torch.arange(steps)[:, None]
        places, rows = torch.unique(met, return_inverse=True)
        padded = torch.cat([sample.token_ids, sample.token_ids.new_zeros(steps)])
        chain_tokens.append(padded[places])
        chain_rows.append(rows + chain_start)
        query_rows.append(query + key_start)
        key_start += count
        chain_start += len(places)
    pairs = list(zip(samples, keys, strict=True))
    return Layout(
        aux=torch.cat([sample.aux[:count] for sample, count in pairs]).float(),
        key_positions=torch.cat([torch.arange(count) for count in keys]),
        key_tokens=torch.cat([sample.token_ids[1 : count + 1] for sample, count in pairs]),
        query_rows=torch.cat(query_rows),
        query_positions=torch.cat(list(queries)),
        chain_tokens=torch.cat(chain_tokens),
        chain_rows=list(torch.cat(chain_rows, dim=1)),
        key_counts=keys,
        query_counts=[len(query) for query in queries],
    )


@dataclass(frozen=True)
class Batch:
    """The samples of one optimiser step and what supervises them."""

    layout: Layout
    last: torch.Tensor | None
    """[P, H] float32: the target's last state at the P supervised places, or None where `top` is there."""
    top: TopTokens | None
    """The target's distribution at the P places, or None where `last` is there."""
    choices: torch.Tensor
    """[P]: the target's most likely tokens there."""
    step_queries: list[torch.Tensor]
    """Step by step: the supervised queries, as rows of the layout's queries."""
    step_places: list[torch.Tensor]
    """Step by step: their places, rising, as rows of `last` or `top`."""
    positions: int
    """Tokens of the samples, whether supervised or not."""


def make_batch(samples: Sequence[Sample], places: Sequence[torch.Tensor], steps: int) -> Batch:
    """The batch of samples with their rising supervised places, none of them empty, for that many steps."""
    offsets = torch.arange(1, steps + 1)[:, None]
    queries = []
    for place in places:
        positions = place - offsets
        queries.append(torch.unique(positions[positions >= 0]))
    step_queries: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    step_places: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    query_start = place_start = 0
    for place, query in zip(places, queries, strict=True):
        for step in range(steps):
            inside = place > step
            step_queries[step].append(torch.searchsorted(query, place[inside] - 1 - step) + query_start)
            step_places[step].append(inside.nonzero()[:, 0] + place_start)
        query_start += len(query)
        place_start += len(place)
    pairs = list(zip(samples, places, strict=True))
    return Batch(
        layout=lay_out(samples, queries, steps),
        last=_last_states(pairs),
        top=_top_tokens(pairs),
        choices=torch.cat(
            [sample.choices[torch.searchsorted(sample.candidates, place)] for sample, place in pairs]
        ),
        step_queries=[torch.cat(parts) for parts in step_queries],
        step_places=[torch.cat(parts) for parts in step_places],
        positions=sum(len(sample.token_ids) for sample in samples),
    )


def _last_states(pairs: Sequence[tuple[Sample, torch.Tensor]]) -> torch.Tensor | None:
    parts = [sample.last[place] for sample, place in pairs if sample.last is not None]
    return torch.cat(parts).float() if len(parts) == len(pairs) else None


def _top_tokens(pairs: Sequence[tuple[Sample, torch.Tensor]]) -> TopTokens | None:
    tops = [(sample.top, place) for sample, place in pairs if sample.top is not None]
    if len(tops) < len(pairs):
        return None
    return TopTokens(
        ids=torch.cat([top.ids[place] for top, place in tops]),
        logs=torch.cat([top.logs[place] for top, place in tops]),
        rest=torch.cat([top.rest[place] for top, place in tops]),
        choices=torch.cat([top.choices[place] for top, place in tops]),
    )
