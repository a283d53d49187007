"""The loss: soft cross-entropy with the target's distribution, renormalised over the draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from eyrie.eagle3.batches import Batch
from eyrie.eagle3.figures import Figures
from eyrie.eagle3.fused import Weight, product, rms_norm
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.unroll import unroll
from eyrie.store import TopTokens

# Places whose logits are in memory at once, at the most: so many that their products are as fast as larger
# ones.
PIECE = 512


class LossSettings(Protocol):
    """What of the training settings the loss depends on."""

    @property
    def step_decay(self) -> float:
        """Weight of unrolled step i is step_decay ** i."""

    @property
    def loss_normalisation(self) -> str:
        """supervised or positions: see TrainingSettings."""


def target_distribution(last: torch.Tensor, head_rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The target's probabilities [P, D] over the draft vocabulary alone.

    last: [P, H], after the final norm. head_rows: [D, H], the target head's rows of the draft vocabulary.
    """
    logits = product(last, Weight(head_rows, dtype))
    return torch.softmax(logits, dim=-1, out=logits)


class _WholeGoal:
    """The target's whole distribution, computed from its last states a piece at a time."""

    def __init__(self, last: torch.Tensor, head_rows: torch.Tensor, dtype: torch.dtype) -> None:
        self._last, self._head_rows, self._dtype = last, head_rows.to(dtype), dtype

    def __len__(self) -> int:
        return len(self._last)

    def piece(self, start: int, stop: int) -> _WholePiece:
        """The goal of places start to stop."""
        return _WholePiece(target_distribution(self._last[start:stop], self._head_rows, self._dtype))


class _WholePiece:
    def __init__(self, distribution: torch.Tensor) -> None:
        self._distribution = distribution

    def loss_and_gradient(
        self, logits: torch.Tensor, rows: torch.Tensor, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss of logits [R, D] at the piece's places `rows` [R], and its gradient, in the buffer.

        The logits are lost.
        """
        target = self._distribution
        if len(rows) < len(target):
            target = target.index_select(0, rows)
        agreement = torch.mul(logits, target, out=buffer).sum(dim=-1)
        highest = logits.amax(dim=-1)
        chances = torch.softmax(logits, dim=-1, out=buffer)
        # The likeliest token's logit less its log-probability is the logarithm of the softmax's denominator,
        # which saves a pass for logarithms.
        loss = (highest - chances.amax(dim=-1).log() - agreement).sum()
        # d loss / d logits = softmax - target, as each target row sums to one.
        return loss, chances.sub_(target)


class _TopGoal:
    """The target's k likeliest tokens and the mass of all others.

    The loss of a place is -sum_{v in top} p_v log q_v - rest * log(1 - sum_{v in top} q_v).
    """

    def __init__(self, top: TopTokens, draft_vocab_size: int) -> None:
        self._ids, self._chances = top.ids.long(), top.logs.float().exp()
        # All tokens are among the k: there is no other whose mass could matter.
        self._rest = None if top.ids.shape[1] >= draft_vocab_size else top.rest.float()[:, None]

    def __len__(self) -> int:
        return len(self._ids)

    def piece(self, start: int, stop: int) -> _TopPiece:
        """The goal of places start to stop."""
        rest = None if self._rest is None else self._rest[start:stop]
        return _TopPiece(self._ids[start:stop], self._chances[start:stop], rest)


class _TopPiece:
    def __init__(self, ids: torch.Tensor, chances: torch.Tensor, rest: torch.Tensor | None) -> None:
        self._ids, self._chances, self._rest = ids, chances, rest

    def loss_and_gradient(
        self, logits: torch.Tensor, rows: torch.Tensor, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss of logits [R, D] at the piece's places `rows` [R], which become its gradient.

        With m the target's whole mass (one, but for rounding), q the drafter's softmax and r its softmax over
        the other tokens alone, the gradient is m * q - p at the k tokens and m * q - rest * r elsewhere.
        """
        ids, chances = self._ids[rows], self._chances[rows]
        top = logits.gather(1, ids)
        mass = chances.sum(dim=-1, keepdim=True)
        every = top.logsumexp(dim=-1, keepdim=True)
        loss = -(chances * top).sum()
        if self._rest is None:
            logits.zero_()
        else:
            rest = self._rest[rows]
            mass = mass + rest
            # The sum over the others is taken without the k, not as a difference: that would round to
            # nothing.
            logits.scatter_(1, ids, -torch.inf)
            highest = logits.amax(dim=-1, keepdim=True)
            others = logits.sub_(highest).exp_().sum(dim=-1, keepdim=True)
            log_others = highest + others.log()
            every = torch.logaddexp(every, log_others)
            loss = loss - (rest * log_others).sum()
            logits.mul_(mass * (highest - every).exp() - rest / others)
        logits.scatter_(1, ids, mass * (top - every).exp() - chances)
        return loss + (mass * every).sum(), logits


def _even_piece(count: int) -> int:
    """The size of the fewest pieces that are at most PIECE: a small last one would be slow for its size."""
    return -(-count // max(1, -(-count // PIECE)))


class SoftCrossEntropy(torch.autograd.Function):
    """The head and its loss in one, for all steps, with the gradients computed on the way forward.

    sum over steps and their rows of scale * loss(goal at the row's place, states @ weight.T). Logits,
    probabilities and their gradient share one buffer; nothing of the size [places, D] is kept, and a goal's
    piece serves all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        goal: _WholeGoal | _TopGoal,
        places: list[torch.Tensor],
        scales: list[float],
        dtype: torch.dtype,
        figures: Figures | None,
        *states: torch.Tensor,
    ) -> torch.Tensor:
        """weight: [D, H]. A list entry or `states` [R, H] for each step; places rise. A scalar."""
        cast = weight.to(dtype)
        trained = ctx.needs_input_grad[0]
        grad_weight = torch.zeros_like(weight) if trained else None
        grad_states = [torch.empty_like(state) for state in states]
        total = weight.new_zeros(())
        # Two buffers for all pieces: the system would else hand out, and clear, new pages for each.
        size = _even_piece(len(goal))
        buffers = [weight.new_empty(size, len(weight)) for _ in range(2)]
        for start in range(0, len(goal), size):
            stop = min(start + size, len(goal))
            piece = goal.piece(start, stop)
            parts = zip(states, places, scales, grad_states, strict=True)
            for step, (state, place, scale, grad_state) in enumerate(parts):
                rows = slice(*torch.searchsorted(place, place.new_tensor([start, stop])).tolist())
                inputs = state[rows].to(dtype)
                logits, buffer = (whole[: len(inputs)] for whole in buffers)
                if dtype == torch.float32:
                    torch.mm(inputs, cast.t(), out=logits)
                else:
                    logits.copy_(inputs @ cast.t())
                if figures is not None:
                    figures.guess(step, logits, place[rows])
                loss, gradient = piece.loss_and_gradient(logits, place[rows] - start, buffer)
                if figures is not None:
                    figures.lose(step, loss)
                total += scale * loss
                gradient = gradient.to(dtype)
                grad_state[rows] = (gradient @ cast).float().mul_(scale)
                if grad_weight is not None and dtype == torch.float32:
                    grad_weight.addmm_(gradient.t(), inputs, alpha=scale)
                elif grad_weight is not None:
                    grad_weight.add_((gradient.t() @ inputs).float(), alpha=scale)
        ctx.save_for_backward(grad_weight, *grad_states)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that forward left."""
        grad_weight, *grad_states = ctx.saved_tensors
        outer = grad_outputs[0]
        grad_weight = None if grad_weight is None else grad_weight.mul_(outer)
        return (grad_weight, *[None] * 5, *(grad.mul_(outer) for grad in grad_states))


def step_divisors(batch: Batch, settings: LossSettings) -> list[float]:
    """What each step's summed loss is divided by, as far as this batch adds to it.

    The divisors of the parts of one global batch add up to those of the whole.
    """
    if settings.loss_normalisation == "positions":
        return [float(batch.positions)] * len(batch.step_queries)
    return [float(len(rows)) for rows in batch.step_queries]


def unrolled_loss(
    drafter: Drafter,
    batch: Batch,
    head_rows: torch.Tensor,
    settings: LossSettings,
    dtype: torch.dtype,
    step_totals: Sequence[float] | None = None,
    figures: Figures | None = None,
) -> torch.Tensor:
    """The training-time test's loss: the sum over steps of step_decay ** i times the step's mean loss.

    head_rows: [D, H], the target head's rows of the draft vocabulary. step_totals: the divisors of the global
    batch that this one is a part of, so that the parts' losses and gradients add up to the whole's; None:
    this batch is the whole. figures: also count what the log tells. A step without a place adds nothing.
    """
    totals = step_divisors(batch, settings) if step_totals is None else step_totals
    states, places, scales = [], [], []
    for step, hidden in enumerate(unroll(drafter, batch.layout, dtype)):
        rows, place = batch.step_queries[step], batch.step_places[step]
        if len(rows):
            chosen = hidden if len(rows) == len(hidden) else hidden.index_select(0, rows)
            states.append(rms_norm(chosen, drafter.norm.weight, drafter.norm.eps))
            places.append(place)
            scales.append(settings.step_decay**step / totals[step])
    if figures is not None:
        figures.begin(drafter, batch)
    return SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        drafter.lm_head.weight, _goal(batch, head_rows, dtype), places, scales, dtype, figures, *states
    )


def _goal(batch: Batch, head_rows: torch.Tensor, dtype: torch.dtype) -> _WholeGoal | _TopGoal:
    if batch.top is not None:
        return _TopGoal(batch.top, len(head_rows))
    assert batch.last is not None
    return _WholeGoal(batch.last, head_rows, dtype)
