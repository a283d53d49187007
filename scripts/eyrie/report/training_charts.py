"""Charts of the training: loss, right guesses by unrolled step, and validation; and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from eyrie.report.chart import (
    BLUE,
    DASHES,
    ROW_HEIGHT,
    SERIES,
    Cell,
    Chart,
    categories_downwards,
    new_figure,
)
from eyrie.report.inputs import Job
from eyrie.report.training_curves import TrainingCurves, measured

Line = tuple[Sequence[int], Sequence[float]]


def training_charts(curves: TrainingCurves) -> list[Chart]:
    """What the run's log has figures for; a build without validation rows lacks the last two."""
    charts = [
        _curves(
            "loss",
            "Training loss",
            "Cross-entropy with the target's own distribution, summed over the unrolled steps.",
            "loss",
            {"loss": (curves.steps, curves.loss)},
        )
    ]
    if curves.right:
        charts.append(
            _curves(
                "right-guesses",
                "Right guesses in training",
                "Share of places where the likeliest draft token is the target's, by unrolled step.",
                "share",
                {f"step {rank + 1}": (curves.steps, right) for rank, right in enumerate(curves.right)},
                percent=True,
            )
        )
    points = measured(curves.validation)
    if not points:
        return charts
    steps = [point["step"] for point in points]
    charts.append(
        _curves(
            "validation",
            "Validation acceptance",
            "Acceptance length replayed on the validation share.",
            "acceptance length",
            {"validation": (steps, [point["acceptance_length"] for point in points])},
        )
    )
    drafted = min(len(point.get("accepted_at", ())) for point in points)
    if drafted:
        charts.append(
            _curves(
                "validation-positions",
                "Validation acceptance by position",
                "Share of cycles that accept a drafted token and all before it.",
                "share",
                {
                    f"position {rank + 1}": (steps, [point["accepted_at"][rank] for point in points])
                    for rank in range(drafted)
                },
                percent=True,
            )
        )
    return charts


def _curves(
    id: str, title: str, description: str, axis: str, lines: Mapping[str, Line], percent: bool = False
) -> Chart:
    """Curves over the optimiser's steps, by the name of what they show."""
    figure = new_figure(300)
    for rank, (name, (steps, values)) in enumerate(lines.items()):
        figure.add_scatter(
            x=list(steps),
            y=list(values),
            name=name,
            mode="lines+markers" if len(steps) < 30 else "lines",
            line={"color": SERIES[rank % len(SERIES)], "dash": DASHES[rank % len(DASHES)], "width": 2},
            hovertemplate="step %{x}: %{y:" + (".1%" if percent else ".3f") + "}<extra>" + name + "</extra>",
        )
    figure.update_xaxes(title_text="optimiser step", nticks=6)
    figure.update_yaxes(title_text=axis, tickformat=".0%" if percent else "")
    rows: list[list[Cell]] = [
        [name, len(steps), values[0], values[-1]] for name, (steps, values) in lines.items() if values
    ]
    return Chart(id, title, description, figure, ("curve", "points", "first", "last"), rows)


def stage_times(jobs: Sequence[Job]) -> Chart:
    """Wall seconds by stage, summed over its jobs, which may have run side by side."""
    of_stage: defaultdict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        of_stage[job.stage].append(job)
    stages = sorted(of_stage, key=lambda stage: -_seconds(of_stage[stage]))
    figure = new_figure(ROW_HEIGHT * len(stages) + 70)
    figure.add_bar(
        x=[_seconds(of_stage[stage]) for stage in stages],
        y=stages,
        orientation="h",
        marker={"color": BLUE[0]},
        customdata=[len(of_stage[stage]) for stage in stages],
        hovertemplate="%{y}: %{x:.1f} s in %{customdata} jobs<extra></extra>",
    )
    figure.update_xaxes(title_text="seconds of all jobs", nticks=5)
    categories_downwards(figure, stages)
    return Chart(
        "stages",
        "Where the time went",
        "Wall time of every stage's jobs; jobs may run side by side.",
        figure,
        ("stage", "jobs", "seconds", "largest job, MB"),
        [
            (
                stage,
                len(of_stage[stage]),
                round(_seconds(of_stage[stage]), 1),
                round(max(job.peak_mb for job in of_stage[stage])) or None,
            )
            for stage in stages
        ],
    )


def _seconds(jobs: Sequence[Job]) -> float:
    return sum(job.seconds for job in jobs)
