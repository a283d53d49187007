"""Whether an answer ended in a loop: a model that fell into one repeats few runs of tokens until the end."""

from __future__ import annotations

from collections.abc import Sequence

RUN = 4
"""Tokens of the runs that are compared."""
FEWEST_RUNS = 32
"""A shorter end tells nothing: lists and code repeat themselves, too."""
DISTINCT_SHARE = 1 / 8
"""At most this share of an end's runs are different ones where it is a loop: it went round eight times."""


def is_degenerate(token_ids: Sequence[int]) -> bool:
    """Whether the answer has an end, of any length from FEWEST_RUNS runs on, that is a loop.

    The ends are looked at from the shortest on in one pass, so that a loop of a few tokens and one of a whole
    paragraph are found alike, wherever they began. Takes time in proportion to the answer's length.
    """
    runs: set[tuple[int, ...]] = set()
    for count, start in enumerate(range(len(token_ids) - RUN, -1, -1), start=1):
        runs.add(tuple(token_ids[start : start + RUN]))
        if count >= FEWEST_RUNS and len(runs) <= count * DISTINCT_SHARE:
            return True
    return False
