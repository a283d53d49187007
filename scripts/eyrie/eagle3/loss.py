"""The loss: soft cross-entropy with the target's distribution, renormalised over the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from eyrie.eagle3.batches import Batch
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.unroll import product, unroll


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
        *states: torch.Tensor,
    ) -> torch.Tensor:
        """weight: [D, H]. targets: [P, D]. A list entry or `states` [R, H] for each step. A scalar."""
        cast = weight.to(dtype)
        grad_weight = torch.zeros_like(weight)
        grad_states = []
        total = weight.new_zeros(())
        for state, place, scale in zip(states, places, scales, strict=True):
            inputs = state.to(dtype)
            target = targets if len(place) == len(targets) else targets[place]
            logs = (inputs @ cast.t()).float().log_softmax(dim=-1)
            total -= scale * torch.dot(logs.view(-1), target.view(-1))
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
        return (grad_weight * outer, None, None, None, None, *(grad * outer for grad in grad_states))


def unrolled_loss(
    drafter: Drafter, batch: Batch, head_rows: torch.Tensor, decay: float, dtype: torch.dtype
) -> torch.Tensor:
    """The training-time test's loss: the sum over steps of decay ** i times the mean over their own places.

    head_rows: [D, H], the target head's rows of the draft vocabulary. A step without a place adds nothing.
    """
    with torch.no_grad():
        targets = target_distribution(batch.last, head_rows, dtype)
    states, places, scales = [], [], []
    for step, hidden in enumerate(unroll(drafter, batch.layout, dtype)):
        rows, place = batch.step_queries[step], batch.step_places[step]
        if len(rows):
            states.append(drafter.norm(hidden)[rows])
            places.append(place)
            scales.append(decay**step / len(rows))
    return SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        drafter.lm_head.weight, targets, places, scales, dtype, *states
    )
