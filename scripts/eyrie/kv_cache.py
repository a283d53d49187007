"""A key-value cache with room to grow.

The library's grows by concatenation: each token copies all keys and values before it, which is a quarter
of the time in which a large batch is answered. Here they lie at the beginning of a larger buffer, so that a
token is written behind them; only when the room is used up are they moved to a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Positions that a full buffer is enlarged by, and the least share of its length.
_ROOM, _SHARE = 64, 0.25


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [B, kv_heads, length, head_dim]: views of the buffers' first positions."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [B, kv_heads, S, head_dim]; returns all that the layer now holds."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            room = end + max(_ROOM, int(end * _SHARE))
            self._buffers = (
                _enlarged(self.keys, key_states, start, room),
                _enlarged(self.values, value_states, start, room),
            )
        keys, values = self._buffers
        keys[..., start:end, :] = key_states
        values[..., start:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._buffers = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence; the next token finds no room and makes it."""
        super().batch_repeat_interleave(repeats)
        self._buffers = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order; the next token finds no room and makes it."""
        super().batch_select_indices(indices)
        self._buffers = None


def _enlarged(old: torch.Tensor, new: torch.Tensor, length: int, room: int) -> torch.Tensor:
    """A buffer for `room` positions shaped as `new`, its first `length` ones taken from `old`."""
    buffer = new.new_empty(*new.shape[:-2], room, new.shape[-1])
    if length:
        buffer[..., :length, :] = old
    return buffer


def roomy_cache(config: Any) -> DynamicCache:
    """An empty cache for a model's configuration; layers with a sliding window stay the library's own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def repeated(cache: DynamicCache, times: int) -> DynamicCache:
    """A cache of its own in which each sequence of `cache` stands `times` times."""
    copy = deepcopy(cache)
    copy.batch_repeat_interleave(times)
    return copy


def is_stackable(cache: DynamicCache) -> bool:
    """Whether `stacked` can take caches of this kind: without a sliding window, all positions are there."""
    return all(isinstance(layer, RoomyLayer) for layer in cache.layers)


def stacked(caches: Sequence[DynamicCache], shared: int, length: int) -> DynamicCache:
    """One cache with the sequences of all, in their order, each `length` positions long.

    A shorter one gets padding behind its first `shared` positions. The caches are used up.
    """
    if len(caches) == 1:
        return caches[0]
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        keys = torch.cat([_padded(layer.keys, shared, length) for layer in layers])
        values = torch.cat([_padded(layer.values, shared, length) for layer in layers])
        layers[0].reset()
        layers[0].update(keys, values)
    return caches[0]


def _padded(states: torch.Tensor, shared: int, length: int) -> torch.Tensor:
    """[B, kv_heads, n, head_dim] to [B, kv_heads, length, head_dim]."""
    padding = states.new_zeros(*states.shape[:2], length - states.shape[2], states.shape[3])
    return torch.cat([states[:, :, :shared], padding, states[:, :, shared:]], dim=2)
