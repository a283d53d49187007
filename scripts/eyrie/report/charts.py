"""The report's charts, as Plotly figures in the page's light colours.

The page swaps every colour for its dark counterpart where the reader prefers dark (see template.html), so a
chart may use the colours below and no others.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from eyrie.report.inputs import Dataset, Job

# Light colour and its counterpart on a dark page. The first two tell series apart, also for the colour-blind.
BLUE = ("#2563c9", "#79abff")
ORANGE = ("#c2570c", "#f79a4b")
GREEN = ("#1a7f5a", "#4cc79a")
GREY = ("#9aa3af", "#687282")
INK = ("#24292f", "#e3e7ec")
FAINT = ("#e2e5e9", "#333b45")
PALETTE = (BLUE, ORANGE, GREEN, GREY, INK, FAINT)

_SERIES = (BLUE[0], ORANGE[0], GREEN[0], GREY[0])
_ROW_HEIGHT = 30


@dataclass(frozen=True)
class Chart:
    """A figure under a name of its own, and what it says in words for those who can't see it."""

    id: str
    title: str
    description: str
    figure: go.Figure

    @property
    def json(self) -> str:
        """The figure's data and layout; safe inside a script element."""
        figure = self.figure.to_plotly_json()
        figure["layout"].pop("template", None)
        return json.dumps(figure, sort_keys=True, allow_nan=False).replace("<", "\\u003c")

    @property
    def height(self) -> int:
        """Pixels to keep free before the chart is drawn."""
        return int(self.figure.layout.height)


def acceptance_by_dataset(lengths: dict[str, dict[str, float | None]]) -> Chart:
    """Acceptance length of each dataset and in all; one dot for each length of the drafts."""
    names = ["all", *sorted(set().union(*lengths.values()) - {"all"})]
    figure = _figure(_ROW_HEIGHT * len(names) + 100)
    for colour, symbol, (drafted, values) in zip(
        _SERIES, ("circle", "diamond", "square", "x"), lengths.items(), strict=False
    ):
        shown = [name for name in names if values.get(name) is not None]
        figure.add_scatter(
            x=[values[name] for name in shown],
            y=shown,
            mode="markers",
            name=f"{drafted} drafted",
            marker={"size": 11, "color": colour, "symbol": symbol},
            hovertemplate="%{y}: %{x:.2f}<extra></extra>",
        )
    figure.update_xaxes(title="tokens a pass", rangemode="normal")
    figure.add_vline(x=1, line={"color": GREY[0], "width": 1, "dash": "dot"})
    _categories_downwards(figure, names)
    return Chart(
        "acceptance-by-dataset",
        "Acceptance length by dataset",
        "Tokens that one pass of the target yields: the accepted drafts and one of its own. 1 is no gain.",
        figure,
    )


def acceptance_by_position(rates: dict[str, list[float]]) -> Chart:
    """The share of cycles that accept each drafted position, with all before it."""
    figure = _figure(320)
    for colour, (drafted, values) in zip(_SERIES, rates.items(), strict=False):
        figure.add_bar(
            x=list(range(1, len(values) + 1)),
            y=values,
            name=f"{drafted} drafted",
            marker={"color": colour},
            hovertemplate="position %{x}: %{y:.0%}<extra></extra>",
        )
    figure.update_xaxes(title="position in the draft", dtick=1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return Chart(
        "acceptance-by-position",
        "Acceptance by position",
        "The share of cycles in which a drafted token was accepted, and thus all before it.",
        figure,
    )


def rows_funnel(datasets: Sequence[Dataset]) -> Chart:
    """What became of each dataset's raw rows, as shares."""
    parts = (
        ("became samples", BLUE[0], [dataset.samples for dataset in datasets]),
        ("duplicate or over the cap", GREY[0], [dataset.left_out for dataset in datasets]),
        ("could not be used", ORANGE[0], [dataset.unusable for dataset in datasets]),
        ("got no usable answer", GREEN[0], [dataset.unanswered for dataset in datasets]),
    )
    names = [dataset.name for dataset in datasets]
    figure = _figure(_ROW_HEIGHT * len(names) + 110)
    for label, colour, counts in parts:
        if any(counts):
            figure.add_bar(
                x=[n / max(d.raw_rows, 1) for n, d in zip(counts, datasets, strict=True)],
                y=names,
                orientation="h",
                name=label,
                marker={"color": colour},
                customdata=counts,
                hovertemplate="%{y}: %{customdata} rows, %{x:.0%}<extra>" + label + "</extra>",
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(tickformat=".0%", title="share of the raw rows", range=[0, 1], tickvals=[0, 0.5, 1])
    _categories_downwards(figure, names)
    return Chart(
        "rows", "What became of the raw rows", "Every row that was read ends in one of these shares.", figure
    )


def trained_tokens(datasets: Sequence[Dataset]) -> Chart:
    """How many supervised tokens each dataset gives to training."""
    names = [dataset.name for dataset in datasets]
    figure = _figure(_ROW_HEIGHT * len(names) + 70)
    figure.add_bar(
        x=[dataset.trained_tokens for dataset in datasets],
        y=names,
        orientation="h",
        marker={"color": BLUE[0]},
        hovertemplate="%{y}: %{x:,} tokens<extra></extra>",
    )
    figure.update_xaxes(title="supervised tokens in the training share")
    _categories_downwards(figure, names)
    return Chart(
        "tokens",
        "What each dataset teaches",
        "Tokens that the drafter learns to predict, by dataset.",
        figure,
    )


def stage_times(jobs: Sequence[Job]) -> Chart:
    """Wall seconds by stage, summed over its jobs, which may have run side by side."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for job in jobs:
        seconds[job.stage].append(job.seconds)
    stages = sorted(seconds, key=lambda stage: -sum(seconds[stage]))
    figure = _figure(_ROW_HEIGHT * len(stages) + 70)
    figure.add_bar(
        x=[sum(seconds[stage]) for stage in stages],
        y=stages,
        orientation="h",
        marker={"color": BLUE[0]},
        customdata=[len(seconds[stage]) for stage in stages],
        hovertemplate="%{y}: %{x:.1f} s in %{customdata} jobs<extra></extra>",
    )
    figure.update_xaxes(title="seconds, summed over the stage's jobs")
    _categories_downwards(figure, stages)
    return Chart(
        "stages", "Where the time went", "Wall time of every stage's jobs; jobs may run side by side.", figure
    )


def curves(
    id: str, title: str, description: str, axis: str, lines: dict[str, tuple[list[int], list[float]]]
) -> Chart:
    """Curves over the optimiser's steps, by the name of what they show."""
    figure = _figure(320)
    for colour, (name, (steps, values)) in zip(_SERIES, lines.items(), strict=False):
        figure.add_scatter(
            x=steps,
            y=values,
            name=name,
            mode="lines+markers" if len(steps) < 30 else "lines",
            line={"color": colour, "width": 2},
            hovertemplate="step %{x}: %{y:.3f}<extra>" + name + "</extra>",
        )
    figure.update_xaxes(title="optimiser step")
    figure.update_yaxes(title=axis)
    return Chart(id, title, description, figure)


def _figure(height: int) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 24, "t": 16, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK[0]},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        hoverlabel={"font": {"family": "system-ui, sans-serif"}},
        # A finger that scrolls the page must not zoom the chart.
        dragmode=False,
        bargap=0.3,
    )
    axis = {"gridcolor": FAINT[0], "zerolinecolor": FAINT[0], "automargin": True, "fixedrange": True}
    figure.update_xaxes(**axis, title_font_size=13)
    figure.update_yaxes(**axis, title_font_size=13)
    return figure


def _categories_downwards(figure: go.Figure, names: Sequence[str]) -> None:
    """Categories on the y axis from top to bottom, with every name shown."""
    axis: dict[str, Any] = {"categoryorder": "array", "categoryarray": list(reversed(names))}
    figure.update_yaxes(**axis, tickmode="linear", ticksuffix="  ", showgrid=False)
