"""The report's page: figures in words, charts and examples, put into the templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from eyrie.recipes import result_settings
from eyrie.report import acceptance_charts, data_charts, training_charts, value_charts
from eyrie.report.chart import PALETTE, Cell, Chart
from eyrie.report.inputs import Build
from eyrie.trace import Node

TEMPLATES = Path(__file__).parent / "templates"


def render(build: Build) -> str:
    """The whole page. Equal builds give equal text; every text from a file is escaped by the template."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["number"] = number
    environment.filters["pretty"] = pretty_json
    evaluation = build.evaluation
    return environment.get_template("page.html").render(
        build=build,
        settings=result_settings(build.config),
        evaluation=evaluation,
        pays=evaluation.get("pays"),
        acceptance=build.evidence.acceptance,
        scaling=build.evidence.scaling,
        serving=build.evidence.serving,
        first=next(iter(evaluation["acceptance_length"])),
        tiles=tiles(build),
        warnings=warnings(build),
        manifests={"evaluation.json": evaluation, "training.json": build.training}
        | {f"hidden states of {manifest['dataset']}": manifest for manifest in build.manifests},
        chains=chains(list(build.trace.tree())),
        charts={chart.id: chart for chart in build_charts(build)},
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        draw=Markup((TEMPLATES / "draw.js").read_text(encoding="utf-8")),
        dark_colours=Markup(json.dumps(dict(PALETTE))),
        plotly=Markup(get_plotlyjs()),
    )


def build_charts(build: Build) -> list[Chart]:
    """Every chart that the build has figures for."""
    evaluation, evidence = build.evaluation, build.evidence
    charts = [
        acceptance_charts.decoded_by_dataset(evaluation),
        acceptance_charts.decoded_by_position(evaluation["acceptance_by_position"]),
        data_charts.funnels(build.datasets),
        data_charts.rows_fate(build.datasets),
        data_charts.trained_tokens(build.datasets),
        *data_charts.length_histograms(build.datasets, build.lengths),
        data_charts.length_ranges(build.datasets, build.lengths),
        *training_charts.training_charts(build.curves),
    ]
    if evidence.acceptance is not None:
        charts += acceptance_charts.replayed_charts(evidence.acceptance)
    if evaluation.get("pays"):
        charts.append(value_charts.speed_up(evaluation["pays"]))
    if evidence.scaling is not None:
        charts.append(value_charts.scaling(evidence.scaling))
    if evidence.serving is not None:
        charts.append(value_charts.served(evidence.serving))
    if build.jobs:
        charts.append(training_charts.stage_times(build.jobs))
    return charts


def tiles(build: Build) -> list[tuple[str, str, str]]:
    """The build at a glance: what, how much, and a note on it."""
    evaluation, datasets = build.evaluation, build.datasets
    first, lengths = next(iter(evaluation["acceptance_length"].items()))
    equal = evaluation["identical_outputs"]
    target = build.config.target
    found = [
        ("Target", target.name, target.hub_id or str(target.dtype)),
        (
            "Rows",
            number(sum(dataset.samples for dataset in datasets)),
            f"samples of {len(datasets)} datasets, from {number(sum(d.raw_rows for d in datasets))} raw rows",
        ),
        (
            "Tokens",
            number(sum(dataset.trained_tokens for dataset in datasets)),
            f"to learn from, of {number(sum(dataset.tokens for dataset in datasets))} in all samples",
        ),
        ("Acceptance length", number(lengths["all"]), f"tokens a pass, {first} drafted, held-out prompts"),
        *_speed_tiles(build, first),
        (
            "Identical outputs",
            f"{equal['equal']} of {equal['total']}",
            f"drafted and plain decoding, {equal['dtype']}",
        ),
    ]
    return found


def _speed_tiles(build: Build, first: str) -> list[tuple[str, str, str]]:
    """How much faster, measured here and by a server, and whether that pays; what was not measured lacks."""
    evaluation, serving = build.evaluation, build.evidence.serving
    found = []
    if evaluation["speed_up"]:
        speed = evaluation["tokens_per_second"]
        note = f"{speed['plain']:.1f} to {speed['drafted'][first]:.1f} tokens/s, {first} drafted"
        found.append(("Speed-up", f"{evaluation['speed_up'][first]:.2f}×", note))
    if serving is not None:
        rates, engine = serving["tokens_per_second"], serving["engine"]
        note = (
            f"{rates['plain']:.1f} to {rates['drafted']:.1f} tokens/s, {engine['name']} {engine['version']}"
        )
        found.append(("Served speed-up", f"{serving['speed_up']:.2f}×", note))
    if pays := evaluation.get("pays"):
        best = str(pays["best_draft_tokens"])
        note = f"{pays['speed_up'][best]:.2f}× expected with {best} drafted"
        found.append(("Does it pay", "yes" if pays["pays"] else "no", note))
    return found


def warnings(build: Build) -> list[str]:
    """What a reader should know before trusting the figures."""
    acceptance = build.evidence.acceptance or {}
    return [
        *build.evaluation["warnings"],
        *acceptance.get("warnings", []),
        *(f"{name} tells of another drafter than this one; make it anew." for name in build.evidence.stale),
    ]


def chains(tree: Sequence[tuple[int, Node]]) -> list[tuple[str, list[tuple[int, Node]]]]:
    """The tree below its root in pieces, one for each thing that the drafter was made from directly.

    Each has a title: the dataset's name, or what it is.
    """
    starts = 0

    def piece(entry: tuple[int, Node]) -> int:
        nonlocal starts
        starts += entry[0] == 1
        return starts

    pieces = [list(group) for _, group in groupby(tree[1:], key=piece)]
    return [(_title(nodes[0][1]), nodes) for nodes in pieces]


def _title(node: Node) -> str:
    path = Path(node.name)
    if path.name in ("manifest.json", "tokenized_data.jsonl"):
        return path.parent.name
    return path.name if node.kind == "file" else node.kind


def number(value: Cell) -> str:
    """Whole numbers with separators, others with two digits, and a dash for what was not measured."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def pretty_json(value: Mapping[str, Any]) -> str:
    """JSON for a reader."""
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
