"""The report's page: figures in words, charts and examples, put into the template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from eyrie.recipes import result_settings
from eyrie.report import charts
from eyrie.report.inputs import Build


def render(build: Build) -> str:
    """The whole page. Equal builds give equal text; every text from a file is escaped by the template."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["number"] = number
    environment.filters["pretty"] = pretty_json
    evaluation = build.evaluation
    return environment.get_template("template.html").render(
        build=build,
        settings=result_settings(build.config),
        evaluation=evaluation,
        first=next(iter(evaluation["acceptance_length"])),
        tiles=tiles(build),
        target_digest=next(
            digest for path, digest in evaluation["parents"].items() if Path(path).name == "target.json"
        ),
        lengths_table=lengths_table(evaluation["acceptance_length"]),
        stages=stage_table(build),
        manifests={"evaluation.json": evaluation, "training.json": build.training}
        | {f"hidden states of {manifest['dataset']}": manifest for manifest in build.manifests},
        charts={chart.id: chart for chart in build_charts(build)},
        palette=charts.PALETTE,
        dark_colours=json.dumps(dict(charts.PALETTE)),
        plotly=get_plotlyjs(),
    )


def build_charts(build: Build) -> list[charts.Chart]:
    """Every chart that the build has figures for."""
    evaluation = build.evaluation
    found = [
        charts.acceptance_by_dataset(evaluation["acceptance_length"]),
        charts.acceptance_by_position(evaluation["acceptance_by_position"]),
        charts.rows_funnel(build.datasets),
        charts.trained_tokens(build.datasets),
        *training_charts(build.training),
    ]
    return [*found, charts.stage_times(build.jobs)] if build.jobs else found


def training_charts(training: Mapping[str, Any]) -> list[charts.Chart]:
    """Loss and validation acceptance over the steps; a build without validation rows has the first alone."""
    loss = training["loss"]
    found = [
        charts.curves(
            "loss",
            "Training loss",
            "Cross-entropy with the target's own distribution, summed over the unrolled steps.",
            "loss",
            {"training": ([point["step"] for point in loss], [point["loss"] for point in loss])},
        )
    ]
    measured = [point for point in training["validation"] if point["acceptance_length"] is not None]
    if measured:
        found.append(
            charts.curves(
                "validation",
                "Validation acceptance",
                "Acceptance length replayed on the validation share, 3 drafted tokens.",
                "acceptance length",
                {
                    "validation": (
                        [point["step"] for point in measured],
                        [point["acceptance_length"] for point in measured],
                    )
                },
            )
        )
    return found


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
        (
            "Identical outputs",
            f"{equal['equal']} of {equal['total']}",
            f"drafted and plain decoding, {equal['dtype']}",
        ),
    ]
    if evaluation["speed_up"]:
        speed = evaluation["tokens_per_second"]
        note = f"{speed['plain']:.1f} to {speed['drafted'][first]:.1f} tokens/s, {first} drafted"
        found.insert(4, ("Speed-up", f"{evaluation['speed_up'][first]:.2f}×", note))
    return found


def lengths_table(lengths: Mapping[str, Mapping[str, float | None]]) -> list[tuple[str, list[float | None]]]:
    """Acceptance length as rows: the dataset's name and a value for each length of the drafts."""
    names = ["all", *sorted(set().union(*lengths.values()) - {"all"})]
    return [(name, [values.get(name) for values in lengths.values()]) for name in names]


def stage_table(build: Build) -> list[tuple[str, int, float, float]]:
    """Stage, jobs, their seconds, and the largest job's megabytes, the longest stage first."""
    stages = sorted({job.stage for job in build.jobs})
    rows = [(stage, [job for job in build.jobs if job.stage == stage]) for stage in stages]
    table = [
        (stage, len(jobs), sum(job.seconds for job in jobs), max(job.peak_mb for job in jobs))
        for stage, jobs in rows
    ]
    return sorted(table, key=lambda row: -row[2])


def number(value: float | int | None) -> str:
    """Whole numbers with separators, others with two digits, and a dash for what was not measured."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def pretty_json(value: object) -> str:
    """JSON for a reader."""
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
