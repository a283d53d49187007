"""Charts of what is accepted: by decoding held-out prompts, and replayed on all their stored states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyrie.report.chart import (
    MARKS,
    ROW_HEIGHT,
    SERIES,
    Cell,
    Chart,
    bars_by_position,
    categories_downwards,
    interval,
    new_figure,
    no_gain_line,
    rows_at,
)

_WAYS = ("greedy", "sampled")


def decoded_by_dataset(evaluation: Mapping[str, Any]) -> Chart:
    """Acceptance length of each dataset and in all; one mark for each length of the drafts."""
    lengths = evaluation["acceptance_length"]
    names = _all_first(lengths.values())
    figure = new_figure(ROW_HEIGHT * len(names) + 100)
    for rank, (drafted, values) in enumerate(lengths.items()):
        shown = [name for name in names if values.get(name) is not None]
        figure.add_scatter(
            x=[values[name] for name in shown],
            y=shown,
            mode="markers",
            name=f"{drafted} drafted",
            marker={"size": 11, "color": SERIES[rank % 4], "symbol": MARKS[rank % 4]},
            hovertemplate="%{y}: %{x:.2f}<extra></extra>",
        )
    figure.update_xaxes(title_text="tokens a pass", rangemode="normal")
    no_gain_line(figure)
    categories_downwards(figure, names)
    return Chart(
        "acceptance-by-dataset",
        "Acceptance length by dataset",
        "Tokens that one pass of the target yields: the accepted drafts and one of its own. 1 is no gain.",
        figure,
        ("dataset", *(part for drafted in lengths for part in (f"{drafted} drafted", "prompts"))),
        [
            (name, *(cell for drafted in lengths for cell in _with_prompts(evaluation, drafted, name)))
            for name in names
        ],
    )


def _with_prompts(evaluation: Mapping[str, Any], drafted: str, name: str) -> tuple[Cell, Cell]:
    prompts = evaluation["prompts"][drafted]
    count = sum(prompts.values()) if name == "all" else prompts.get(name, 0)
    return evaluation["acceptance_length"][drafted].get(name), count


def decoded_by_position(rates: Mapping[str, Sequence[float]]) -> Chart:
    """The share of cycles that accept each drafted position, with all before it."""
    figure = new_figure(320)
    longest = max((len(values) for values in rates.values()), default=0)
    bars_by_position(figure, {f"{drafted} drafted": values for drafted, values in rates.items()}, told=False)
    return Chart(
        "acceptance-by-position",
        "Acceptance by position in the draft",
        "The share of cycles in which a drafted token was accepted, and thus all before it.",
        figure,
        ("position", *(f"{drafted} drafted" for drafted in rates)),
        [
            (place + 1, *(values[place] if place < len(values) else None for values in rates.values()))
            for place in range(longest)
        ],
    )


def replayed_charts(acceptance: Mapping[str, Any]) -> list[Chart]:
    """Charts of acceptance.json: by dataset and by position in the answer, and by position in the draft.

    The first two are for the first length of the drafts, the last for the longest.
    """
    walk = acceptance["walk"]
    drafted = [str(length) for length in acceptance["draft_tokens"] if str(length) in walk]
    if not drafted:
        return []
    longest = max(drafted, key=int)
    return [
        _replayed_by_dataset(drafted[0], walk[drafted[0]]),
        _replayed_by_place(drafted[0], walk[drafted[0]]),
        _replayed_by_position(longest, walk[longest]),
    ]


def _replayed_by_dataset(drafted: str, walk: Mapping[str, Any]) -> Chart:
    ways = [way for way in _WAYS if way in walk]
    figures = {way: {"all": walk[way]["all"], **walk[way]["datasets"]} for way in ways}
    names = _all_first(figures.values())
    figure = new_figure(ROW_HEIGHT * len(names) + 100)
    places = rows_at(figure, names, len(ways))
    for rank, way in enumerate(ways):
        shown = _measured(figures[way], names)
        figure.add_scatter(
            x=[one["acceptance_length"] for _, one in shown],
            y=[places[rank][names.index(name)] for name, _ in shown],
            customdata=[name for name, _ in shown],
            name=way,
            mode="markers",
            marker={"size": 9, "color": SERIES[rank], "symbol": MARKS[rank]},
            error_x=_errors([one for _, one in shown]),
            hovertemplate="%{customdata}: %{x:.2f}<extra>" + way + "</extra>",
        )
    figure.update_xaxes(title_text=f"tokens a pass, {drafted} drafted", rangemode="normal")
    no_gain_line(figure)
    return Chart(
        "replayed-by-dataset",
        "Replayed on all held-out samples",
        "Acceptance length on stored states, with 95 % intervals over groups of prompts: greedy, and sampled "
        "at temperature 1.",
        figure,
        ("dataset", *(part for way in ways for part in (way, "low", "high", "cycles"))),
        [(name, *(cell for way in ways for cell in _cells(figures[way].get(name)))) for name in names],
    )


def _replayed_by_place(drafted: str, walk: Mapping[str, Any]) -> Chart:
    ways = [way for way in _WAYS if walk.get(way, {}).get("answer_position")]
    figure = new_figure(320)
    rows: list[list[Cell]] = []
    for rank, way in enumerate(ways):
        bins = [one for one in walk[way]["answer_position"] if one["acceptance_length"] is not None]
        figure.add_scatter(
            x=[_places(one) for one in bins],
            y=[one["acceptance_length"] for one in bins],
            name=way,
            mode="lines+markers",
            marker={"size": 8, "symbol": MARKS[rank]},
            line={"color": SERIES[rank], "width": 2},
            error_y=_errors(bins),
            hovertemplate="tokens %{x}: %{y:.2f}<extra>" + way + "</extra>",
        )
        rows += [[way, _places(one), *_cells(one)] for one in bins]
    figure.update_xaxes(title_text="token of the answer", type="category")
    figure.update_yaxes(title_text=f"tokens a pass, {drafted} drafted")
    no_gain_line(figure, across=True)
    return Chart(
        "replayed-by-place",
        "Along the answer",
        "Acceptance length by how far the answer has come, with 95 % intervals.",
        figure,
        ("way", "tokens", "length", "low", "high", "cycles"),
        rows,
    )


def _replayed_by_position(drafted: str, walk: Mapping[str, Any]) -> Chart:
    ways = [way for way in _WAYS if way in walk]
    figure = new_figure(320)
    rates = {way: walk[way]["all"]["by_position"] for way in ways}
    bars_by_position(figure, rates)
    return Chart(
        "replayed-by-position",
        "Along the draft",
        f"The share of cycles that accept a drafted token and all before it, {drafted} drafted.",
        figure,
        ("position", *ways),
        [
            (place + 1, *(values[place] for values in rates.values()))
            for place in range(min(map(len, rates.values()), default=0))
        ],
    )


def _all_first(figures: Any) -> list[str]:
    names: set[str] = set().union(*figures)
    return ["all", *sorted(names - {"all"})]


def _measured(figures: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (name, figures[name])
        for name in names
        if name in figures and figures[name]["acceptance_length"] is not None
    ]


def _errors(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals; a figure without one has none to show."""
    values = [one["acceptance_length"] for one in figures]
    low = [value if one["low"] is None else one["low"] for one, value in zip(figures, values, strict=True)]
    high = [value if one["high"] is None else one["high"] for one, value in zip(figures, values, strict=True)]
    return interval(values, low, high)


def _cells(one: Mapping[str, Any] | None) -> Iterator[Cell]:
    for key in ("acceptance_length", "low", "high", "cycles"):
        yield None if one is None else one[key]


def _places(one: Mapping[str, Any]) -> str:
    """A bin of the answer's tokens in words, counted from 1."""
    return f"{one['from'] + 1}–{one['to']}" if one.get("to") is not None else f"{one['from'] + 1} on"
