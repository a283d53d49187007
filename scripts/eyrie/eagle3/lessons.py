"""What a training run computes, known in advance: every step's samples, and each process's parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eyrie.config import TrainingSettings
from eyrie.eagle3.batches import Batch, make_batch, plan_steps
from eyrie.eagle3.loss import step_divisors
from eyrie.eagle3.processes import Processes
from eyrie.eagle3.samples import StoredSamples
from eyrie.gates import GateError


@dataclass(frozen=True)
class Part:
    """What is computed at once of a step. totals: the divisors of the whole step; None for a whole step."""

    batch: Batch
    totals: list[float] | None


@dataclass(frozen=True)
class Lessons:
    """The training samples that have something to teach, and every step's share of them.

    places: how many supervised places each sample has. steps: epoch (from 1) and sample indices, step by
    step. All processes have the same ones.
    """

    samples: StoredSamples
    places: Sequence[int]
    steps: Sequence[tuple[int, list[int]]]
    t2d: torch.Tensor
    settings: TrainingSettings
    processes: Processes

    @classmethod
    def plan(
        cls, samples: StoredSamples, t2d: torch.Tensor, settings: TrainingSettings, processes: Processes
    ) -> Lessons:
        """The whole course. Raises GateError where there is nothing to learn."""
        places = [
            len(samples.bare(index).supervised(t2d, settings.position_mask)) for index in range(len(samples))
        ]
        useful = [index for index, count in enumerate(places) if count]
        if not useful:
            raise GateError(
                f"none of the {len(samples)} training rows has a supervised token that the drafter can "
                "propose\n  change: drafter.draft_vocab_size, or look at the loss masks of the rows"
            )
        epochs = plan_steps([places[index] for index in useful], settings)
        steps = [
            (number, [useful[index] for index in step])
            for number, epoch in enumerate(epochs, start=1)
            for step in epoch
        ]
        return cls(samples, places, steps, t2d, settings, processes)

    def ends_epoch(self, step: int) -> bool:
        """Whether the step is the last one of its epoch."""
        return step + 1 == len(self.steps) or self.steps[step][0] != self.steps[step + 1][0]

    def places_of(self, step: int) -> int:
        """How many supervised places a step visits."""
        return sum(self.places[index] for index in self.steps[step][1])

    def parts(self, step: int) -> list[list[int]]:
        """The samples of each part that this process computes of a step; none where it has no share."""
        indices = self.steps[step][1]
        share = shares(indices, self.places, self.processes.count)[self.processes.rank]
        return micro_batches(share, self.places, self.settings.micro_batch_tokens)

    def work_from(self, step: int) -> Iterator[Part]:
        """This process's parts of all steps from that one on, with their states."""
        for later in range(step, len(self.steps)):
            parts = self.parts(later)
            whole = len(parts) == 1 and len(parts[0]) == len(self.steps[later][1])
            totals = None if whole or not parts else self._totals(later)
            for part in parts:
                yield Part(self._batch(part), totals)

    def _batch(self, indices: Sequence[int]) -> Batch:
        samples = self.samples.load(indices)
        places = [sample.supervised(self.t2d, self.settings.position_mask) for sample in samples]
        return make_batch(samples, places, self.settings.ttt_steps)

    def _totals(self, step: int) -> list[float]:
        """The divisors of a whole step; they ask for no state, so none is read for them."""
        samples = [self.samples.bare(index) for index in self.steps[step][1]]
        places = [sample.supervised(self.t2d, self.settings.position_mask) for sample in samples]
        return step_divisors(make_batch(samples, places, self.settings.ttt_steps), self.settings)


def shares(indices: Sequence[int], places: Sequence[int], count: int) -> list[list[int]]:
    """A step's samples dealt to `count` processes in their order, each about as many supervised places."""
    total = sum(places[index] for index in indices)
    dealt: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for index in indices:
        middle = 2 * before + places[index]
        dealt[middle * count // (2 * total)].append(index)
        before += places[index]
    return dealt


def micro_batches(indices: Sequence[int], places: Sequence[int], limit: int | None) -> list[list[int]]:
    """The samples in their order, in parts of at most `limit` supervised places; a longer one is a part."""
    parts: list[list[int]] = []
    filled = 0
    for index in indices:
        if not parts or (limit is not None and filled + places[index] > limit):
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += places[index]
    return parts
