"""How good the drafter is on rows that it does not learn from, without running the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eyrie.eagle3.batches import Sample, make_batch
from eyrie.eagle3.chains import draft_greedily, grouped, likeliest
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.moving import moved
from eyrie.eagle3.unroll import unroll

MOST_ROWS = 40
DRAFT_TOKENS = 3


@torch.inference_mode()
def validate(drafter: Drafter, samples: Sequence[Sample], steps: int) -> dict[str, Any]:
    """Figures of the first MOST_ROWS samples.

    teacher_forced: step by step, the share of supervised places where the drafter, fed with the sample's
    own tokens, proposes the target's most likely token (one outside the draft vocabulary counts as
    missed). acceptance_length: see `walk`.
    """
    samples = samples[:MOST_ROWS]
    return {"rows": len(samples), "teacher_forced": _teacher_forced(drafter, samples, steps)} | walk(
        drafter, samples, DRAFT_TOKENS
    )


def _teacher_forced(drafter: Drafter, samples: Sequence[Sample], steps: int) -> list[float | None]:
    hits, totals = [0] * steps, [0] * steps
    for group in grouped(sample for sample in samples if len(sample.candidates)):
        batch = make_batch(group, [sample.candidates for sample in group], steps)
        batch = moved(batch, drafter.embedding.device)
        for step, hidden in enumerate(unroll(drafter, batch.layout)):
            guesses = likeliest(drafter, hidden[batch.step_queries[step]])
            hits[step] += int((guesses == batch.choices[batch.step_places[step]]).sum())
            totals[step] += len(guesses)
    return [hit / total if total else None for hit, total in zip(hits, totals, strict=True)]


@torch.inference_mode()
def walk(drafter: Drafter, samples: Sequence[Sample], draft_tokens: int) -> dict[str, Any]:
    """Greedy speculative decoding replayed over the samples' own answers.

    From each answer's first token on, the drafter proposes `draft_tokens` tokens, fed with its own; those
    that continue the answer are accepted, and the next cycle starts one token (the target's own) later.
    A cycle that the answer's end would cut short is not counted.
    acceptance_length: tokens a cycle, 1 + accepted / cycles. accepted_at: the share of cycles that accept
    the first, the second, ... token. Both None without a cycle.
    """
    cycles = 0
    accepted_at = [0] * draft_tokens
    for group in grouped(samples):
        starts = [_cycle_starts(sample, draft_tokens) for sample in group]
        pairs = [(sample, start) for sample, start in zip(group, starts, strict=True) if len(start)]
        if not pairs:
            continue
        counts = _accepted_counts(drafter, pairs, draft_tokens)
        for (_, start), accepted in zip(pairs, counts, strict=True):
            for count in _cycles(start.tolist(), accepted.tolist()):
                cycles += 1
                for position in range(count):
                    accepted_at[position] += 1
    return {
        "cycles": cycles,
        "acceptance_length": 1 + sum(accepted_at) / cycles if cycles else None,
        "accepted_at": [count / cycles for count in accepted_at] if cycles else None,
    }


def _cycle_starts(sample: Sample, draft_tokens: int) -> torch.Tensor:
    """The positions p after which draft_tokens more tokens of the same answer follow token p + 1."""
    mask = sample.loss_mask
    positions = torch.arange(max(0, len(mask) - 1 - draft_tokens))
    inside = torch.ones(len(positions), dtype=torch.bool)
    for offset in range(1, draft_tokens + 2):
        inside &= mask[offset : offset + len(positions)]
    return positions[inside]


def _accepted_counts(
    drafter: Drafter, pairs: Sequence[tuple[Sample, torch.Tensor]], draft_tokens: int
) -> list[torch.Tensor]:
    """For each sample, how many drafted tokens are accepted from each of its cycle starts."""
    samples, starts = [sample for sample, _ in pairs], [start for _, start in pairs]
    chains = draft_greedily(drafter, samples, starts, draft_tokens)
    counts = []
    for (sample, start), chain in zip(pairs, chains, strict=True):
        own = sample.token_ids[start[:, None] + 2 + torch.arange(draft_tokens)]
        counts.append((chain == own).cumprod(dim=1).sum(dim=1))
    return counts


def _cycles(starts: Sequence[int], accepted: Sequence[int]) -> Iterator[int]:
    """The accepted counts of the cycles that a decoder would make; each answer is walked from its start."""
    next_start = -1
    previous = -2
    for start, count in zip(starts, accepted, strict=True):
        if start != previous + 1:
            next_start = start
        previous = start
        if start == next_start:
            yield count
            next_start = start + count + 1
