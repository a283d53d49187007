"""Confidence intervals by drawing groups anew: rows of a group resemble each other, so rows would flatter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TIMES = 1000
_OUTSIDE = 2.5
"""Percent on each side of a 95 % interval."""


def resampled(sums: Floats, times: int = TIMES, seed: int = 0) -> Floats:
    """Column sums [times, C] of so many draws, with replacement, of as many groups as there are.

    sums: what each of G groups adds up to, [G, C]. The draws depend on G and the seed alone, so that two
    results over the same groups, in the same order, are drawn alike.
    """
    groups = len(sums)
    counts = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=times)
    return counts @ sums


def interval(values: Floats) -> tuple[float, float] | None:
    """The bounds that hold 95 % of the drawn values that are numbers; None where there are none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    # Of drawn values themselves, so that infinite ones do no harm.
    low, high = np.percentile(known, [_OUTSIDE, 100 - _OUTSIDE], method="closest_observation")
    return float(low), float(high)
