"""Charts of what the drafter is worth: speed-up by length of the drafts, scaling, what a server accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.report.chart import (
    BAND,
    BLUE,
    GREY,
    MARKS,
    ORANGE,
    Chart,
    bars_by_position,
    interval,
    new_figure,
    no_gain_line,
)


def speed_up(pays: Mapping[str, Any]) -> Chart:
    """The speed-up that the costs and the acceptance give for each length of the drafts."""
    lengths = sorted(pays["speed_up"], key=int)
    values = [pays["speed_up"][length] for length in lengths]
    best = str(pays["best_draft_tokens"])
    figure = new_figure(300)
    figure.add_bar(
        x=lengths,
        y=values,
        marker={"color": [ORANGE[0] if length == best else BLUE[0] for length in lengths]},
        text=[f"{value:.2f}" for value in values],
        textposition="auto",
        hovertemplate="%{x} drafted: %{y:.2f}<extra></extra>",
    )
    no_gain_line(figure, across=True)
    figure.update_xaxes(title_text="draft tokens", type="category")
    figure.update_yaxes(title_text="speed-up", rangemode="tozero")
    return Chart(
        "speed-up",
        "Speed-up by length of the drafts",
        f"Acceptance length over the cost of a cycle, in plain steps. Best with {best} drafted; below 1 the "
        "drafter slows the target down.",
        figure,
        ("draft tokens", "speed-up"),
        list(zip(lengths, values, strict=True)),
    )


def scaling(figures: Mapping[str, Any]) -> Chart:
    """Acceptance against training tokens: what was measured, the curve fitted to it, and what it needs."""
    points, curve = figures["points"], figures["fit"]["curve"]
    figure = new_figure(360)
    figure.add_scatter(
        x=[one["tokens"] for one in curve] + [one["tokens"] for one in reversed(curve)],
        y=[one["high"] for one in curve] + [one["low"] for one in reversed(curve)],
        fill="toself",
        fillcolor=BAND[0],
        line={"width": 0, "color": BAND[0]},
        mode="lines",
        name="95 % of the fits",
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[one["tokens"] for one in curve],
        y=[one["acceptance_length"] for one in curve],
        mode="lines",
        line={"color": BLUE[0], "width": 2},
        name="fitted",
        hovertemplate="%{x:,.0f} tokens: %{y:.2f}<extra>fitted</extra>",
    )
    values = [one["acceptance_length"] for one in points]
    figure.add_scatter(
        x=[one["tokens"] for one in points],
        y=values,
        customdata=[one["share"] for one in points],
        error_y=interval(values, [one["low"] for one in points], [one["high"] for one in points]),
        mode="markers",
        marker={"size": 10, "color": ORANGE[0], "symbol": MARKS[1]},
        name="trained on a share",
        hovertemplate="%{customdata}: %{x:,} tokens, %{y:.2f}<extra></extra>",
    )
    for wanted in sorted(figures["needed"]["acceptance_length"], key=float):
        figure.add_hline(
            y=float(wanted),
            line={"color": GREY[0], "width": 1, "dash": "dot"},
            annotation={"text": wanted, "font": {"size": 11}, "showarrow": False},
        )
    figure.update_xaxes(type="log", title_text="supervised tokens")
    tokens = [one["tokens"] for one in points]
    figure.update_xaxes(tickvals=tokens, ticktext=[f"{count / 1000:,.3g}k" for count in tokens])
    figure.update_yaxes(title_text=f"tokens a pass, {figures['draft_tokens']} drafted")
    return Chart(
        "scaling",
        "Acceptance against data",
        "Drafters trained on shares of the groups, with 95 % intervals, and the curve fitted to them.",
        figure,
        ("share", "groups", "tokens", "acceptance length", "low", "high"),
        [
            (one["share"], one["groups"], one["tokens"], one["acceptance_length"], one["low"], one["high"])
            for one in points
        ],
    )


def served(figures: Mapping[str, Any]) -> Chart:
    """What the server accepted by position in the draft beside Eyrie's own figure for the same prompts."""
    rates = figures["acceptance_by_position"]
    figure = new_figure(300)
    bars_by_position(figure, {name: rates[name] for name in ("server", "eyrie")})
    return Chart(
        "served",
        "Accepted by the server",
        "The share of drafts accepted at each position, as the server counts them and as Eyrie decodes.",
        figure,
        ("position", "server", "eyrie"),
        [(place + 1, *both) for place, both in enumerate(zip(rates["server"], rates["eyrie"], strict=False))],
    )
