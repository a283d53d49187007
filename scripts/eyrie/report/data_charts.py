"""Charts of the data: a funnel for each dataset, what became of its rows, what it teaches, how long it is."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from plotly.subplots import make_subplots

from eyrie.lengths import Lengths, histogram, quantiles
from eyrie.report.chart import (
    BLUE,
    DASHES,
    GREY,
    INK,
    MARKS,
    ORANGE,
    ROW_HEIGHT,
    SERIES,
    SLATE,
    STAGES,
    Cell,
    Chart,
    categories_downwards,
    interval,
    new_figure,
    rows_at,
)
from eyrie.report.inputs import Dataset

_FUNNEL_HEIGHT = 140
# Bins are parts of octaves, so every second power of two is told.
_TOKENS = {"type": "log", "title_text": "tokens", "tickvals": [4**power for power in range(12)]}
_SHARES = (0.05, 0.5, 0.95)


def funnels(datasets: Sequence[Dataset]) -> Chart:
    """A small funnel for each dataset, two abreast, from its raw rows to those that training sees."""
    lines = -(-len(datasets) // 2)
    grid = make_subplots(
        *(lines, 2),
        subplot_titles=[dataset.name for dataset in datasets],
        horizontal_spacing=0.06,
        vertical_spacing=0.26 / max(lines, 1),
    )
    figure = new_figure(_FUNNEL_HEIGHT * lines + 30, grid)
    for place, dataset in enumerate(datasets):
        stages, counts = zip(*dataset.funnel, strict=True)
        figure.add_funnel(
            y=stages,
            x=counts,
            name=dataset.name,
            text=[f"{count:,}" for count in counts],
            texttemplate="%{text}",
            textfont={"size": 11, "color": INK[0]},
            textposition="outside",
            marker={"color": [light for light, _ in STAGES]},
            connector={"visible": False},
            hovertemplate="%{y}: %{x:,} rows<extra>" + dataset.name + "</extra>",
            showlegend=False,
            row=place // 2 + 1,
            col=place % 2 + 1,
        )
    # Numbers stand outside of the bars, so the bars leave them room.
    for place, dataset in enumerate(datasets):
        widest = max(count for _, count in dataset.funnel)
        figure.update_xaxes(
            range=[-0.95 * widest, 0.95 * widest], visible=False, row=place // 2 + 1, col=place % 2 + 1
        )
    figure.update_yaxes(tickfont_size=11, ticks="", showgrid=False)
    figure.update_yaxes(showticklabels=False, col=2)
    figure.update_annotations(font_size=12, yshift=-3)
    return Chart(
        "funnels",
        "From raw rows to training, by dataset",
        "For each dataset the rows that were read, kept, answered, made into samples, and that are in the "
        "training share. Each funnel has a scale of its own.",
        figure,
        ("dataset", "raw rows", "kept", "answered", "samples", "in training"),
        [(dataset.name, *(count for _, count in dataset.funnel)) for dataset in datasets],
    )


def rows_fate(datasets: Sequence[Dataset]) -> Chart:
    """What became of each dataset's raw rows, as shares."""
    parts = (
        ("selected", BLUE[0], "", [dataset.prompts - dataset.unanswered for dataset in datasets]),
        ("duplicate or over the cap", GREY[0], "", [dataset.left_out for dataset in datasets]),
        ("could not be used", ORANGE[0], "/", [dataset.unusable for dataset in datasets]),
        ("no usable answer", SLATE[0], ".", [dataset.unanswered for dataset in datasets]),
    )
    names = [dataset.name for dataset in datasets]
    figure = new_figure(ROW_HEIGHT * len(names) + 120)
    for label, colour, pattern, counts in parts:
        if any(counts):
            figure.add_bar(
                x=[n / max(d.raw_rows, 1) for n, d in zip(counts, datasets, strict=True)],
                y=names,
                orientation="h",
                name=label,
                marker={"color": colour, "pattern": {"shape": pattern}},
                customdata=counts,
                hovertemplate="%{y}: %{customdata} rows, %{x:.0%}<extra>" + label + "</extra>",
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="share of the raw rows")
    figure.update_xaxes(tickformat=".0%", range=[0, 1], tickvals=[0, 0.5, 1])
    categories_downwards(figure, names)
    return Chart(
        "rows",
        "What became of the raw rows",
        "Every row that was read ends in one of these shares.",
        figure,
        ("dataset", *(label for label, _, _, _ in parts)),
        [(name, *(counts[place] for _, _, _, counts in parts)) for place, name in enumerate(names)],
    )


def trained_tokens(datasets: Sequence[Dataset]) -> Chart:
    """How many supervised tokens each dataset gives to training."""
    names = [dataset.name for dataset in datasets]
    tokens = [dataset.trained_tokens for dataset in datasets]
    figure = new_figure(ROW_HEIGHT * len(names) + 70)
    figure.add_bar(
        x=tokens,
        y=names,
        orientation="h",
        marker={"color": BLUE[0]},
        hovertemplate="%{y}: %{x:,} tokens<extra></extra>",
    )
    figure.update_xaxes(title_text="supervised tokens in training", nticks=4)
    categories_downwards(figure, names)
    return Chart(
        "tokens",
        "What each dataset teaches",
        "Tokens that the drafter learns to predict, by dataset.",
        figure,
        ("dataset", "supervised tokens in training"),
        list(zip(names, tokens, strict=True)),
    )


def length_histograms(datasets: Sequence[Dataset], lengths: Mapping[str, Lengths]) -> list[Chart]:
    """How the lengths of prompts and of answers are spread, one line a partition."""
    partitions: dict[str, tuple[array[int], array[int]]] = {}
    for dataset in datasets:
        prompt, answer = partitions.setdefault(dataset.partition, (array("I"), array("I")))
        prompt.extend(lengths[dataset.name].prompt)
        answer.extend(lengths[dataset.name].answer)
    return [
        _histogram(
            "prompt-lengths",
            "How long prompts are",
            "Share of a partition's samples by tokens that are not supervised; bins grow with the length.",
            {name: prompt for name, (prompt, _) in partitions.items()},
        ),
        _histogram(
            "answer-lengths",
            "How long answers are",
            "Share of a partition's samples by supervised tokens; bins grow with the length.",
            {name: answer for name, (_, answer) in partitions.items()},
        ),
    ]


def _histogram(id: str, title: str, description: str, lengths: Mapping[str, array[int]]) -> Chart:
    figure = new_figure(300)
    rows: list[Sequence[Cell]] = []
    for rank, (name, values) in enumerate(sorted(lengths.items())):
        edges, counts = histogram(values)
        figure.add_scatter(
            # A logarithmic axis has no place for a length of 0.
            x=[max(edge, 0.7) for edge in edges],
            y=[count / len(values) for count in counts],
            customdata=counts,
            name=name,
            mode="lines",
            line={
                "shape": "hv",
                "color": SERIES[rank % len(SERIES)],
                "dash": DASHES[rank % len(DASHES)],
                "width": 2,
            },
            hovertemplate="from %{x} tokens: %{customdata} samples, %{y:.1%}<extra>" + name + "</extra>",
        )
        rows.append((name, len(values), *quantiles(values, _SHARES), max(values, default=0)))
    figure.update_xaxes(**_TOKENS)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return Chart(
        id, title, description, figure, ("partition", "samples", "5 %", "median", "95 %", "longest"), rows
    )


def length_ranges(datasets: Sequence[Dataset], lengths: Mapping[str, Lengths]) -> Chart:
    """The middle nine tenths of each dataset's prompts and answers."""
    names = [dataset.name for dataset in datasets]
    figure = new_figure(ROW_HEIGHT * len(names) + 100)
    places = rows_at(figure, names, 2)
    found = {}
    for rank, kind in enumerate(("prompt", "answer")):
        spread = [quantiles(getattr(lengths[name], kind), _SHARES) for name in names]
        found[kind] = spread
        middle = [median for _, median, _ in spread]
        figure.add_scatter(
            x=middle,
            y=places[rank],
            name=kind,
            mode="markers",
            marker={"size": 9, "color": SERIES[rank], "symbol": MARKS[rank]},
            error_x=interval(middle, [low for low, _, _ in spread], [high for _, _, high in spread]),
            customdata=[[name, *three] for name, three in zip(names, spread, strict=True)],
            hovertemplate="%{customdata[0]}: %{customdata[1]} to %{customdata[3]}, median %{x}"
            "<extra>" + kind + "</extra>",
        )
    figure.update_xaxes(**_TOKENS)
    return Chart(
        "length-ranges",
        "Lengths by dataset",
        "The median, and the range of the middle nine tenths of the samples.",
        figure,
        ("dataset", "prompt: 5 %", "median", "95 %", "answer: 5 %", "median", "95 %"),
        [
            (name, *prompt, *answer)
            for name, prompt, answer in zip(names, found["prompt"], found["answer"], strict=True)
        ],
    )
