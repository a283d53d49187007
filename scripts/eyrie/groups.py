"""How many samples' states are in memory at once, and become one shard of the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

# Enough for few large files, and little enough that a kill costs minutes.
GROUP_BYTES = 1 << 28


def groups(items: Sequence[Item], sizes: Sequence[int], most: int, limit: int) -> Iterator[Sequence[Item]]:
    """Runs of at most `most` items and, where there is more than one, of at most `limit` in size."""
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and (place - start == most or total + size > limit):
            yield items[start:place]
            start, total = place, 0
        total += size
    if start < len(items):
        yield items[start:]
