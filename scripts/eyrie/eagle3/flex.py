"""The unroll's attention by PyTorch's flex attention: one call a step for all packed samples, for a GPU.

Keys are those of step 0 of all samples, then, step after step, the queries' own later keys. A query sees the
first where they are of its sample and not after it, and of the rest only those of itself. The mask is a
function of the indices, so blocks that it leaves empty cost nothing; a dense mask is never made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from eyrie.eagle3.batches import Layout

_compiled: list[Callable[..., Any]] = []


def _flex(device: torch.device) -> Callable[..., Any]:
    """Flex attention, compiled where there is a GPU; without compiling it is exact, slow and forward only."""
    if device.type != "cuda":
        return flex_attention
    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0]


class FlexAttention:
    """Attention over one layout; use it step by step."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        device = layout.aux.device
        counts = (
            torch.tensor(layout.key_counts, device=device),
            torch.tensor(layout.query_counts, device=device),
        )
        samples = torch.arange(len(layout.key_counts), device=device)
        self._key_samples = samples.repeat_interleave(counts[0])
        self._query_samples = samples.repeat_interleave(counts[1])
        self._layout, self._dtype, self._call = layout, dtype, _flex(device)

    def _mask(self, steps: int) -> BlockMask:
        """Which keys each query sees when `steps` steps have followed step 0."""
        keys, queries = len(self._key_samples), len(self._query_samples)
        key_samples, query_samples = self._key_samples, self._query_samples
        key_positions, query_positions = self._layout.key_positions, self._layout.query_positions

        def sees(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            first = key.clamp(max=keys - 1)
            before = key_positions[first] <= query_positions[query]
            causal = (key < keys) & (key_samples[first] == query_samples[query]) & before
            return causal | ((key >= keys) & ((key - keys) % queries == query))

        device = str(key_samples.device)
        return create_block_mask(sees, None, None, queries, keys + steps * queries, device=device)

    def __call__(
        self, queries: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """queries [Q, heads, head_dim] to mixed values [Q, heads * head_dim], in float32.

        keys, values: [K, kv_heads, head_dim] of step 0, then [Q, kv_heads, head_dim] of each later step.
        """
        ready = [
            torch.cat(list(parts)).to(self._dtype).transpose(0, 1)[None]
            for parts in ([queries], keys, values)
        ]
        mask = self._mask(len(keys) - 1)
        mixed: torch.Tensor = self._call(*ready, block_mask=mask, enable_gqa=True)
        return mixed[0].transpose(0, 1).reshape(len(queries), -1).float()
