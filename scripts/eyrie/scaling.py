"""Acceptance length against training tokens: a fitted curve, what it predicts, and how sure that is.

The curve is AL = a - b * tokens ** -c with b > 0 and c from 0 to 1; at c = 0 it is AL = a + b * log(tokens),
which the other nears. Few points can't tell two separate laws apart, but they can say how much they bend:
where they don't, c is 0 and the curve the more hopeful one; where they do, the length can't rise beyond a.
For each c the rest is a linear fit, so all c of a grid are tried and the one with the least squares kept. No
more than the drafts can be accepted, so a length ends at draft tokens + 1.

The uncertainty is that of the held-out groups: they are drawn anew, the same ones for every point, and the
curve is fitted to each draw. Which training groups a share holds, and the seed, were not varied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyrie.bootstrap import Floats, interval, resampled
from eyrie.estimating import lengths

_POWERS = np.linspace(0.0, 1.0, 41)
_CURVE_POINTS = 25
# The curve is drawn up to so many times the tokens that there are.
_AHEAD = 16.0
# Beyond so many times the tokens that there are a few points say nothing.
_FARTHEST = 1000.0


@dataclass(frozen=True)
class Point:
    """A drafter of a share of the training groups. sums: each held-out group's cycles and accepted tokens."""

    share: str
    groups: int
    tokens: int
    sums: Floats


@dataclass(frozen=True)
class Curves:
    """Fitted curves, [B] of each parameter; the form is the logarithm where the power is 0.

    With x = tokens / unit, AL = offset + slope * log(x), or offset + slope * (1 - x ** -power) / power, which
    is the same as the power nears 0: slope is what the length rises by at x = 1 with each e-fold of tokens.
    """

    unit: float
    most: float
    offset: Floats
    slope: Floats
    power: Floats

    def at(self, tokens: Floats) -> Floats:
        """Acceptance lengths [B, N] at tokens [N]."""
        risen = _shape(np.asarray(tokens)[None] / self.unit, self.power[:, None])
        return np.clip(self.offset[:, None] + self.slope[:, None] * risen, 1.0, self.most)

    def needed(self, length: float) -> Floats:
        """The tokens [B] at which each reaches a length; infinite where it never does, or far too late."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            risen = (length - self.offset) / self.slope
            bent = np.where(self.power > 0, 1 - self.power * risen, 1.0)
            power = np.where(self.power > 0, self.power, 1.0)
            x = np.where(self.power > 0, bent ** (-1 / power), np.exp(risen))
        never = (self.slope <= 0) | (bent <= 0) | (length > self.most)
        return np.where(never, np.inf, x * self.unit)


def _shape(x: Floats, power: Floats) -> Floats:
    """How far the curve has risen at x, in slopes: log(x), or (1 - x ** -power) / power."""
    divisor = np.where(power > 0, power, 1.0)
    return np.where(power > 0, (1 - x**-power) / divisor, np.log(x))


def fit(tokens: Sequence[int], values: Floats, most: float) -> Curves:
    """The curves through lengths [B, N] at the tokens [N]; with two points the logarithm.

    most: no curve passes it.
    """
    unit = float(np.exp(np.mean(np.log(tokens))))
    powers = _POWERS if len(tokens) > 2 else _POWERS[:1]
    risen = _shape(np.array(tokens)[None] / unit, powers[:, None])
    centred = risen - risen.mean(axis=1, keepdims=True)
    mean = values.mean(axis=1)
    slopes = np.maximum((values - mean[:, None]) @ centred.T / (centred**2).sum(axis=1), 0.0)
    offsets = mean[:, None] - slopes * risen.mean(axis=1)
    left = values[:, None] - offsets[..., None] - slopes[..., None] * risen
    # Of equally good ones the least bent; rounding must not choose.
    best = np.argmin(np.round((left**2).sum(axis=-1), 12), axis=1)
    rows = np.arange(len(values))
    return Curves(unit, most, offsets[rows, best], slopes[rows, best], powers[best])


def scaling_figures(
    points: Sequence[Point], draft_tokens: int, wanted: Sequence[float], break_even: float | None
) -> dict[str, Any]:
    """All of scaling.json but its head. points: by rising tokens, over the same held-out groups in one order.

    break_even: the acceptance length from which on the drafter pays, where known.
    """
    tokens = [point.tokens for point in points]
    truth = np.array([[lengths(point.sums.sum(axis=0)) for point in points]])
    # Alike draws for all points: their number of groups and the seed are the same.
    drawn = np.stack([lengths(resampled(point.sums)) for point in points], axis=1)
    drawn = drawn[~np.isnan(drawn).any(axis=1)]
    most = draft_tokens + 1.0
    best, others = fit(tokens, truth, most), fit(tokens, drawn, most)
    until_last, others_until_last = (fit(tokens[:-1], values[:, :-1], most) for values in (truth, drawn))
    last = np.array(tokens[-1:], dtype=np.float64)
    return {
        "points": [
            {
                "share": point.share,
                "groups": point.groups,
                "tokens": point.tokens,
                "acceptance_length": float(truth[0, index]),
                **_bounds(drawn[:, index]),
            }
            for index, point in enumerate(points)
        ],
        "draft_tokens": draft_tokens,
        "fit": {**_form(best), "curve": _curve(best, others, tokens)},
        "needed": {
            "acceptance_length": {str(length): _needed(best, others, length, tokens) for length in wanted},
            "break_even": None
            if break_even is None
            else {"acceptance_length": break_even, **_needed(best, others, break_even, tokens)},
        },
        "prediction_of_last": {
            "predicted": float(until_last.at(last)[0, 0]),
            **_bounds(others_until_last.at(last)[:, 0]),
            "truth": float(truth[0, -1]),
        },
    }


def _bounds(values: Floats) -> dict[str, float | None]:
    found = interval(values)
    return {"low": found and found[0], "high": found and found[1]}


def _form(curves: Curves) -> dict[str, Any]:
    """The best curve in the words and numbers of its form."""
    offset, slope, power = (float(part[0]) for part in (curves.offset, curves.slope, curves.power))
    if power:
        rest = slope / power
        return {
            "form": "a - b * tokens ** -c",
            "parameters": {"a": offset + rest, "b": rest * curves.unit**power, "c": power},
        }
    return {
        "form": "a + b * log(tokens)",
        "parameters": {"a": offset - slope * float(np.log(curves.unit)), "b": slope},
    }


def _curve(best: Curves, others: Curves, tokens: Sequence[int]) -> list[dict[str, Any]]:
    places = np.geomspace(tokens[0], _AHEAD * tokens[-1], _CURVE_POINTS).round()
    drawn = others.at(places)
    return [
        {"tokens": int(place), "acceptance_length": float(length), **_bounds(drawn[:, index])}
        for index, (place, length) in enumerate(zip(places, best.at(places)[0], strict=True))
    ]


def _needed(best: Curves, others: Curves, length: float, tokens: Sequence[int]) -> dict[str, int | None]:
    """Tokens that a length takes, and bounds; None: it is never reached, or beyond what the points tell."""
    bounds = interval(others.needed(length)) or (np.inf, np.inf)
    values = {"tokens": float(best.needed(length)[0]), "low": bounds[0], "high": bounds[1]}
    farthest = _FARTHEST * tokens[-1]
    return {name: round(value) if value <= farthest else None for name, value in values.items()}
