"""Products of few rows with a large weight, for decoding one sequence in float32 on a CPU.

x @ W.T with 2 to 16 rows takes a kernel two to three times slower than W @ x.T, which costs hardly more than
one row: verifying a few drafted tokens then costs about one plain step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# Below this many rows a product is bound by reading the weight.
SKINNY_ROWS = 16


def use_skinny_products(model: nn.Module, least_rows: int = 1) -> None:
    """Let the model's linear layers without bias multiply from the weight's side when there are few rows.

    least_rows: fewer rows are filled up with zeros. With 2, a single row takes the kernel for matrices, which
    reads a weight that lies in memory 1.5 times as fast as the one for a vector.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is None:
            module.forward = _skinny_forward(module, least_rows)  # type: ignore[method-assign]


def _skinny_forward(linear: nn.Linear, least_rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if x.device.type != "cpu" or rows > SKINNY_ROWS:
            return nn.functional.linear(x, linear.weight)
        columns = x.reshape(rows, -1)
        if rows < least_rows:
            columns = nn.functional.pad(columns, (0, 0, 0, least_rows - rows))
        return (linear.weight @ columns.t())[:, :rows].t().reshape(*x.shape[:-1], -1)

    return forward
