"""What all charts of the report share: a figure with its name, its words and its numbers, and the colours.

Figures are Plotly's, in the page's light colours. The page swaps every colour for its dark counterpart where
the reader prefers dark (see draw.js), so a chart may use the colours below and no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import plotly.graph_objects as go

# Light colour and its counterpart on a dark page. A series is told by its mark or dash, too.
BLUE = ("#1f63c4", "#7fb2ff")
ORANGE = ("#c4520a", "#ff9d57")
SLATE = ("#303a46", "#d7dee6")
GREY = ("#98a2ae", "#6d7885")
INK = ("#24292f", "#e3e7ec")
FAINT = ("#e2e5e9", "#333b45")
# The funnel's stages, from the raw rows to training, and the uncertainty around a curve.
STAGES = (
    ("#c9d0d8", "#4a5460"),
    ("#a9c6f0", "#2f4d78"),
    ("#7ba6e4", "#3f6aa6"),
    ("#4c86d6", "#5c8fd6"),
    ("#1f63c4", "#7fb2ff"),
)
BAND = ("#1f63c433", "#7fb2ff33")
PALETTE = tuple(dict(chain((BLUE, ORANGE, SLATE, GREY, INK, FAINT, BAND), STAGES)).items())

SERIES = (BLUE[0], ORANGE[0], SLATE[0], GREY[0])
MARKS = ("circle", "diamond", "square", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
_PATTERNS = ("", "/")
ROW_HEIGHT = 30

Cell = str | int | float | None


@dataclass(frozen=True)
class Chart:
    """A figure under a name of its own, what it says in words, and its numbers as a table."""

    id: str
    title: str
    description: str
    figure: go.Figure
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)

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


def new_figure(height: int, figure: go.Figure | None = None) -> go.Figure:
    """A figure, or one with subplots, as the page shows them: no background, no zoom, a legend above."""
    figure = go.Figure() if figure is None else figure
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


def categories_downwards(figure: go.Figure, names: Sequence[str]) -> None:
    """Categories on the y axis from top to bottom, with every name shown."""
    axis: dict[str, Any] = {"categoryorder": "array", "categoryarray": list(reversed(names))}
    figure.update_yaxes(**axis, tickmode="linear", ticksuffix="  ", showgrid=False)


def rows_at(figure: go.Figure, names: Sequence[str], series: int) -> list[list[float]]:
    """Names on the y axis from top to bottom at whole numbers, and each series' places a little apart."""
    count = len(names)
    figure.update_yaxes(
        tickvals=list(range(count)),
        ticktext=[f"{name}  " for name in reversed(names)],
        range=[-0.6, count - 0.4],
        showgrid=False,
        zeroline=False,
    )
    offsets = [0.13 * (series - 1 - 2 * rank) for rank in range(series)]
    return [[count - 1 - place + offset for place in range(count)] for offset in offsets]


def interval(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    """Bars from low to high around the values, for a trace's error_x or error_y."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [top - value for top, value in zip(high, values, strict=True)],
        "arrayminus": [value - bottom for bottom, value in zip(low, values, strict=True)],
        "thickness": 1.5,
        "width": 0,
    }


def bars_by_position(figure: go.Figure, rates: Mapping[str, Sequence[float]], told: bool = True) -> None:
    """Shares by position in the draft, side by side for each name. told: whether a bar names its series."""
    for rank, (name, values) in enumerate(rates.items()):
        figure.add_bar(
            x=list(range(1, len(values) + 1)),
            y=list(values),
            name=name,
            marker={"color": SERIES[rank % 4], "pattern": {"shape": _PATTERNS[rank % 2]}},
            hovertemplate="position %{x}: %{y:.0%}<extra>" + (name if told else "") + "</extra>",
        )
    figure.update_xaxes(title_text="position in the draft", dtick=1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")


def no_gain_line(figure: go.Figure, at: float = 1.0, across: bool = False) -> None:
    """A dotted line where nothing is gained: at an x, or across the chart at a y."""
    line = {"color": GREY[0], "width": 1.5, "dash": "dot"}
    if across:
        figure.add_hline(y=at, line=line)
    else:
        figure.add_vline(x=at, line=line)
