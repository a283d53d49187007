"""training.jsonl as curves of some hundred points, however many steps there were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from eyrie.records import read_jsonl

_POINTS = 250


@dataclass(frozen=True)
class TrainingCurves:
    """A run's curves. Steps are summed up in runs of equal length: each point is a mean, at the last step.

    loss: by step. right: for each unrolled step the share of places where the likeliest draft token is the
    target's. validation: the lines of the validations, with `step`.
    """

    steps: list[int]
    loss: list[float]
    right: list[list[float]]
    validation: list[dict[str, Any]]


def read_curves(path: Path) -> TrainingCurves:
    """The curves of a run's log. Raises RecordError for a line that is no JSON."""
    lines: list[tuple[int, float, Sequence[float]]] = []
    validation = []
    for line in read_jsonl(path):
        if "validation" in line:
            validation.append({**line["validation"], "step": line["step"]})
        else:
            lines.append((line["step"], line["loss"], tuple(line.get("right_by_step", ()))))
    groups = list(_groups(lines))
    unrolled = min((len(right) for _, _, right in lines), default=0)
    return TrainingCurves(
        steps=[group[-1][0] for group in groups],
        loss=[fmean(loss for _, loss, _ in group) for group in groups],
        right=[[fmean(right[rank] for _, _, right in group) for group in groups] for rank in range(unrolled)],
        validation=validation,
    )


def measured(validation: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The validations that have an acceptance length."""
    return [point for point in validation if point.get("acceptance_length") is not None]


def _groups(
    lines: Sequence[tuple[int, float, Sequence[float]]],
) -> Iterable[Sequence[tuple[int, float, Sequence[float]]]]:
    size = max(1, -(-len(lines) // _POINTS))
    return (lines[start : start + size] for start in range(0, len(lines), size))
