"""What a step's log tells of the loss, counted while it is computed."""

from __future__ import annotations

import torch

from eyrie.eagle3.batches import Batch
from eyrie.eagle3.model import Drafter


class Figures:
    """Sums over the parts of an optimiser step, for each unrolled step: [steps, 3] float64.

    The columns: summed loss, right guesses (the likeliest draft token is the target's likeliest token), and
    places. Nothing is read back from the device until the step's end.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.sums = torch.zeros(steps, 3, dtype=torch.float64, device=device)
        self._right = torch.empty(0, dtype=torch.int64, device=device)

    def begin(self, drafter: Drafter, batch: Batch) -> None:
        """Take the target's likeliest tokens of a batch: as draft ids, -1 for what has none."""
        ids = torch.where(drafter.t2d, drafter.t2d.cumsum(0) - 1, -1)
        self._right = ids[batch.choices]

    def guess(self, step: int, logits: torch.Tensor, places: torch.Tensor) -> None:
        """Count the guesses of an unrolled step: logits [R, D] at the places [R] of the batch."""
        self.sums[step, 1] += (logits.argmax(dim=-1) == self._right[places]).sum()
        self.sums[step, 2] += len(places)

    def lose(self, step: int, loss: torch.Tensor) -> None:
        """Add an unrolled step's summed loss."""
        self.sums[step, 0] += loss
