"""The engine inside the job: prompts answered in batches, or finished samples run through, on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import DynamicCache

from eyrie.config import EngineSettings, SamplingSettings
from eyrie.engines import Answered, FinishReason, Follow, Prompt, Result
from eyrie.engines.checks import check_against_reference, checked_states
from eyrie.groups import GROUP_BYTES, groups
from eyrie.kv_cache import is_stackable, repeated, stacked
from eyrie.records import content_key
from eyrie.stopping import StopRequest
from eyrie.store import States
from eyrie.target import DTYPES, Target

Item = TypeVar("Item")
_LOG = logging.getLogger(__name__)

# Finished rows stay in the batch until the running ones are at most this share of it: taking a row out copies
# the whole cache, which costs as much as some steps of that row.
_RUNNING_SHARE = 0.9

# Tokens of one pass over prompts or samples: enough to fill the matrix products, and little enough to stay
# in the processor's cache. Samples of 40 tokens go 1.4 times as fast eight at once as one by one; from 200
# tokens on there is nothing to gain.
_PASS_TOKENS = 1024


@dataclass
class _Row:
    """One sequence of the running batch; `pieces` are its states so far, [tokens, layers * H + H] each."""

    key: str
    prompt: list[int]
    generator: torch.Generator
    pieces: list[torch.Tensor] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    finished: bool = False


class InProcessEngine:
    """Answers prompts and captures states with a Target, on the number of threads that the settings name."""

    def __init__(
        self,
        target: Target,
        settings: EngineSettings,
        state_dtype: str = "bfloat16",
        stop: StopRequest | None = None,
    ) -> None:
        """state_dtype: how the states of answers are stored. stop: when to leave off answering."""
        torch.set_num_threads(settings.threads)
        self.target = target
        self.settings = settings
        self._state_dtype = state_dtype
        self._stop = stop or StopRequest(settings.stop_grace)
        self._eos = frozenset(target.eos_ids())
        self._running = 0

    def described(self) -> dict[str, Any]:
        """What a manifest tells of this engine."""
        return {"engine": "in_process", "dtype": str(self.target.model.dtype).removeprefix("torch.")}

    def errors(self) -> dict[str, int]:
        """None: a fault here ends the job."""
        return {}

    def running(self) -> int:
        """How many prompts are in the batch."""
        return self._running

    def answer(
        self, prompts: Iterable[Prompt], sampling: SamplingSettings, follow: Follow | None = None
    ) -> Iterator[list[Result]]:
        """Answer (key, token ids) prompts; yields them batch by batch, shortest prompts first.

        The batches follow from the prompts alone: sorted by length and key, cut by batch_size; the prompts
        that follow from a pass's answers are the next pass. The states [tokens, ...] are taken in the same
        pass and stored as state_dtype; the last token is run through the target, too, so that there is one
        row for each token. Raises StoreError for states that are wrong, Stopped after a signal.
        """
        checked = False
        ordered = _by_length(prompts)
        while ordered:
            following = []
            for batch in _cut(ordered, self.settings.batch_size):
                answered = self._answer_group(batch, sampling)
                if not checked and (states := answered[0].states) is not None:
                    self._check(states)
                    checked = True
                if follow is not None:
                    following += [prompt for one in answered if (prompt := follow(one)) is not None]
                yield list(answered)
            ordered = _by_length(following)

    def _answer_group(self, batch: Sequence[Prompt], sampling: SamplingSettings) -> list[Answered]:
        if self._stop.requested:
            raise self._stop.stopped()
        groups = [[prompt] for prompt in batch] if self.settings.batch_independent else [batch]
        self._running = len(batch)
        answered = [one for group in groups for one in self._answer_batch(group, sampling)]
        self._running = 0
        return sorted(answered, key=lambda one: one.key)

    def _answer_batch(self, prompts: Sequence[Prompt], sampling: SamplingSettings) -> Iterator[Answered]:
        rows = [_Row(key, list(ids), _generator(key)) for key, ids in prompts]
        batch = _Batch(self.target, [row.prompt for row in rows], self._state_dtype)
        for row, states in zip(rows, batch.prompt_states, strict=True):
            row.pieces.append(states)
        while rows:
            if self._stop.expired:
                raise self._stop.stopped()
            tokens = self._next_tokens(batch.last, rows, sampling)
            for row, token, states in zip(rows, tokens, batch.step(tokens), strict=True):
                if not row.finished:
                    row.answer.append(token)
                    row.pieces.append(states)
                    row.finished = token in self._eos or len(row.answer) == sampling.max_new_tokens
                    if row.finished:
                        yield self._answered(row)
            running = [number for number, row in enumerate(rows) if not row.finished]
            if len(running) <= len(rows) * _RUNNING_SHARE:
                rows = [rows[number] for number in running]
                batch.keep(running)

    def _answered(self, row: _Row) -> Answered:
        reason: FinishReason = "stop" if row.answer[-1] in self._eos else "length"
        states = self._states(row.prompt + row.answer, torch.cat(row.pieces))
        return Answered(row.key, row.answer, reason, states)

    def _next_tokens(self, last: torch.Tensor, rows: Sequence[_Row], sampling: SamplingSettings) -> list[int]:
        logits = self.target.logits(last)
        if sampling.temperature == 0.0:
            return logits.argmax(dim=-1).tolist()
        points = torch.cat([torch.rand(1, generator=row.generator, dtype=torch.float64) for row in rows])
        return _sample(logits, points, sampling).tolist()

    def _check(self, states: States) -> None:
        difference = check_against_reference(self.target, states)
        _LOG.info("states differ from the reference by %.4f of their length at most", difference)

    def capture(self, samples: Sequence[list[int]], state_dtype: str) -> Iterator[list[States]]:
        """Run finished samples through the target; yields their states in groups, shortest samples first.

        The first sample is compared with the model's own states. Raises StoreError for states that are
        wrong, Stopped after a signal.
        """
        checked = False
        for group in self.capture_plan(samples, state_dtype):
            captured: list[States] = []
            for batch in group:
                if self._stop.requested:
                    raise self._stop.stopped()
                captured += self._capture_batch(batch, state_dtype)
            if not checked:
                self._check(captured[0])
                checked = True
            yield captured

    def capture_plan(
        self, samples: Sequence[list[int]], state_dtype: str
    ) -> Iterator[list[Sequence[list[int]]]]:
        """The passes that the samples are run in, by group: a group becomes a shard of the store.

        Samples of about one length are in a pass of about _PASS_TOKENS tokens, and a group holds batch_size
        samples and GROUP_BYTES of states at most.
        """
        ordered = sorted(samples, key=lambda ids: (len(ids), ids))
        values = (len(self.target.layer_ids) + 1) * self.target.hidden_size
        tokens = GROUP_BYTES // (values * DTYPES[state_dtype].itemsize)
        for group in groups(ordered, list(map(len, ordered)), self.settings.batch_size, tokens):
            rows = 1 if self.settings.batch_independent else max(1, _PASS_TOKENS // len(group[-1]))
            yield list(_cut(group, rows))

    def _capture_batch(self, samples: Sequence[list[int]], state_dtype: str) -> Iterator[States]:
        """One pass, padded on the right: no token looks to its right, so that the padding needs no mask."""
        width = max(map(len, samples))
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in samples])
        values, _ = self.target.packed(ids, DTYPES[state_dtype])
        for one, rows in zip(samples, values, strict=True):
            yield self._states(one, rows[: len(one)])

    def _states(self, ids: list[int], values: torch.Tensor) -> States:
        return checked_states(ids, values, self.target.layer_ids, self.target.hidden_size)


class _Batch:
    """The model's side of a running batch: cache, mask, positions.

    The prompts' common beginning (a system prompt, mostly) is run once and its keys and values shared out.
    The cache then holds, for each row: that beginning, padding, the rest of the prompt, the answer.
    """

    last: torch.Tensor
    """[rows, H]: the state after each row's newest token."""

    def __init__(self, target: Target, prompts: Sequence[list[int]], state_dtype: str) -> None:
        self._target = target
        self._dtype = DTYPES[state_dtype]
        shared = _common_length(prompts) if len(prompts) > 1 else 0
        beginning, beginnings = target.new_cache(), []
        if shared:
            beginnings = [self._run(torch.tensor([prompts[0][:shared]]), beginning, None, None)[0]]
        rests = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rests))
        parts, states, lasts = [], [], []
        # Few rows at a time: what a layer computes on the way then stays in the processor's cache, and rows
        # of about one length need little padding.
        size = max(1, _PASS_TOKENS // width) if is_stackable(beginning) else len(rests)
        for part in _cut(rests, size):
            cache = repeated(beginning, len(part)) if shared else target.new_cache()
            states += [[*beginnings, rows] for rows in self._run_prompts(part, cache, shared)]
            lasts.append(self.last)
            parts.append(cache)
        self.prompt_states = [torch.cat(pieces) for pieces in states]
        self.last = torch.cat(lasts)
        self._cache = stacked(parts, shared, shared + width)
        self._mask = torch.cat([torch.ones(len(rests), shared, dtype=torch.long), _left_mask(rests)], dim=1)
        self._positions = self._mask.sum(dim=1, keepdim=True)

    def _run_prompts(
        self, rests: Sequence[list[int]], cache: DynamicCache, shared: int
    ) -> Iterator[torch.Tensor]:
        """Run what follows the shared beginning; yields the states of each row without padding."""
        real = _left_mask(rests)
        width = real.shape[1]
        ids = torch.tensor([[0] * (width - len(rest)) + rest for rest in rests])
        mask = torch.cat([torch.ones(len(rests), shared, dtype=torch.long), real], dim=1)
        positions = (mask.cumsum(dim=1) - 1)[:, shared:].clamp(min=0)
        states = self._run(ids, cache, mask, positions)
        for row, rest in enumerate(rests):
            yield states[row, width - len(rest) :]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run one more token of each row; its states [rows, 1, layers * H + H]."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        states = self._run(torch.tensor(tokens)[:, None], self._cache, self._mask, self._positions)
        self._positions = self._positions + 1
        return states

    def _run(
        self,
        ids: torch.Tensor,
        cache: DynamicCache,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        states, self.last = self._target.packed(ids, self._dtype, cache, mask, positions)
        return states

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        index = torch.tensor(rows, dtype=torch.long)
        self._cache.batch_select_indices(index)
        self._mask, self._positions, self.last = self._mask[index], self._positions[index], self.last[index]


def _by_length(prompts: Iterable[Prompt]) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: (len(prompt[1]), prompt[0]))


def _cut(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _left_mask(rows: Sequence[list[int]]) -> torch.Tensor:
    """[rows, longest]: 1 for tokens, 0 for the padding on their left."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def _common_length(prompts: Sequence[list[int]]) -> int:
    """How many first tokens all prompts share, leaving each at least one of its own."""
    shortest, longest = min(prompts), max(prompts)  # the lexicographic extremes share what all share
    pairs = zip(shortest[:-1], longest[:-1], strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(shortest), len(longest)) - 1)


def _generator(key: str) -> torch.Generator:
    """Random numbers that depend on the prompt alone, not on its batch."""
    return torch.Generator().manual_seed(int(content_key("sample", key)[:15], 16))


def _sample(logits: torch.Tensor, points: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """One token id a row: the one at `points` [rows] of the cumulated probability, likeliest tokens first."""
    probabilities = (logits.double() / sampling.temperature).softmax(dim=-1)
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    ranked = ranked.masked_fill(before >= sampling.top_p, 0.0)
    cumulated = ranked.cumsum(dim=-1)
    places = torch.searchsorted(cumulated, (points * cumulated[:, -1])[:, None], right=True)
    return ids.gather(1, places.clamp(max=ids.shape[1] - 1))[:, 0]
