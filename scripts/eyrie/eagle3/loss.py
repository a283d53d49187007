"""The loss: soft cross-entropy with the target's distribution, renormalised over the draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from eyrie.eagle3.batches import Batch
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.unroll import product, unroll


class LossSettings(Protocol):
    """What of the training settings the loss depends on."""

    @property
    def step_decay(self) -> float:
        """Weight of unrolled step i is step_decay ** i."""


def target_distribution(last: torch.Tensor, head_rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The target's probabilities [P, D] over the draft vocabulary alone.

    last: [P, H], after the final norm. head_rows: [D, H], the target head's rows of the draft vocabulary.
    """
    return product(last, head_rows, dtype).softmax(dim=-1)


class SoftCrossEntropy(torch.autograd.Function):
    """The head and its loss in one, for all steps, with the gradients computed on the way forward.

    sum over rows r of scale_r * cross-entropy(targets[place_r], softmax(states_r @ weight.T)). Logits,
    probabilities and their gradient share one buffer a step; nothing of the size [rows, D] is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        targets: torch.Tensor,
        places: list[torch.Tensor],
        scales: list[float],
        dtype: torch.dtype,
        figures: Figures | None,
        *states: torch.Tensor,
    ) -> torch.Tensor:
        """weight: [D, H]. targets: [P, D]. A list entry or `states` [R, H] for each step. A scalar."""
        cast = weight.to(dtype)
        grad_weight = torch.zeros_like(weight)
        grad_states = []
        total = weight.new_zeros(())
        for step, (state, place, scale) in enumerate(zip(states, places, scales, strict=True)):
            inputs = state.to(dtype)
            target = targets if len(place) == len(targets) else targets[place]
            logs = (inputs @ cast.t()).float().log_softmax(dim=-1)
            likeness = torch.dot(logs.view(-1), target.view(-1))
            total -= scale * likeness
            if figures is not None:
                figures.add(step, -likeness, logs, place)
            # d loss / d logits = scale * (softmax - target), as each target row sums to one.
            gradient = logs.exp_().sub_(target).mul_(scale).to(dtype)
            grad_states.append((gradient @ cast).float())
            if dtype == torch.float32:
                grad_weight.addmm_(gradient.t(), inputs)
            else:
                grad_weight += (gradient.t() @ inputs).float()
        ctx.save_for_backward(grad_weight, *grad_states)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that forward left."""
        grad_weight, *grad_states = ctx.saved_tensors
        outer = grad_outputs[0]
        return (grad_weight * outer, *[None] * 5, *(grad * outer for grad in grad_states))


class Figures:
    """What a step's log tells of the loss, counted on the way.

    sums: [steps, 3], added to: of cross-entropies, of right guesses (the likeliest draft token is the
    target's likeliest token) and of places. right: the target's likeliest tokens [P] as draft ids, -1 for
    those outside the draft vocabulary.
    """

    def __init__(self, sums: torch.Tensor, right: torch.Tensor) -> None:
        self._sums, self._right = sums, right

    def add(self, step: int, loss: torch.Tensor, scores: torch.Tensor, places: torch.Tensor) -> None:
        """Count a step's summed loss and its scores [R, D] at places [R]."""
        self._sums[step, 0] += loss
        self._sums[step, 1] += (scores.argmax(dim=-1) == self._right[places]).sum()
        self._sums[step, 2] += len(places)


def step_divisors(batch: Batch, settings: LossSettings) -> list[float]:
    """What each step's summed loss is divided by, as far as this batch adds to it."""
    return [float(len(rows)) for rows in batch.step_queries]


def unrolled_loss(
    drafter: Drafter,
    batch: Batch,
    head_rows: torch.Tensor,
    settings: LossSettings,
    dtype: torch.dtype,
    step_totals: Sequence[float] | None = None,
    figures: torch.Tensor | None = None,
) -> torch.Tensor:
    """The training-time test's loss: the sum over steps of step_decay ** i times the step's mean loss.

    head_rows: [D, H], the target head's rows of the draft vocabulary. step_totals: the divisors of the global
    batch that this is a part of, so that the parts' losses and gradients add up to the whole's; None: this
    batch is the whole. figures: sums [steps, 3] that the loss adds to; see Figures. A step without a place
    adds nothing.
    """
    totals = step_divisors(batch, settings) if step_totals is None else step_totals
    with torch.no_grad():
        targets = target_distribution(batch.last, head_rows, dtype)
    states, places, scales = [], [], []
    for step, hidden in enumerate(unroll(drafter, batch.layout, dtype)):
        rows, place = batch.step_queries[step], batch.step_places[step]
        if len(rows):
            states.append(drafter.norm(hidden)[rows])
            places.append(place)
            scales.append(settings.step_decay**step / totals[step])
    counted = None if figures is None else Figures(figures, _draft_ids(drafter, batch.choices))
    return SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        drafter.lm_head.weight, targets, places, scales, dtype, counted, *states
    )


def _draft_ids(drafter: Drafter, token_ids: torch.Tensor) -> torch.Tensor:
    """The draft ids of target ids; -1 for those outside the draft vocabulary."""
    ids = drafter.t2d.cumsum(0) - 1
    return torch.where(drafter.t2d, ids, -1)[token_ids]
