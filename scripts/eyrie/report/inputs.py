"""What the report tells, read from the build's files into one value."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.config import Config, parse_config
from eyrie.gates import WANTED_SKIPS
from eyrie.records import RecordError, read_json


@dataclass(frozen=True)
class Dataset:
    """One dataset's way from raw rows to samples.

    tokens: of all samples, prompts included. trained_tokens: supervised tokens of the training share.
    skipped: rows by reason, of both stages. In sum they are left_out (duplicates, rows over the cap),
    unusable (while reading) and unanswered (without a usable sample).
    """

    name: str
    licence: str
    raw_rows: int
    prompts: int
    samples: int
    tokens: int
    trained_tokens: int
    skipped: dict[str, int]
    left_out: int
    unusable: int
    unanswered: int


@dataclass(frozen=True)
class Job:
    """One job's wall time, from Snakemake's benchmark file: stage, what it worked on, seconds."""

    stage: str
    subject: str
    seconds: float
    peak_mb: float


@dataclass(frozen=True)
class Build:
    """A whole build's evidence."""

    config: Config
    datasets: list[Dataset]
    manifests: list[dict[str, Any]]
    vocabulary: dict[str, Any]
    training: dict[str, Any]
    evaluation: dict[str, Any]
    jobs: list[Job]


def read_build(
    config: Path,
    ledgers: Iterable[Path],
    manifests: Iterable[Path],
    vocabulary: Path,
    training: Path,
    evaluation: Path,
    benchmarks: Path | None,
) -> Build:
    """Read everything; datasets come in the order of their names. Raises RecordError and ConfigError."""
    settings = parse_config(read_json(config))
    states = sorted((read_json(path) for path in manifests), key=lambda manifest: manifest["dataset"])
    return Build(
        config=settings,
        datasets=_datasets(settings, [read_json(path) for path in ledgers], states),
        manifests=states,
        vocabulary=read_json(vocabulary),
        training=read_json(training),
        evaluation=read_json(evaluation),
        jobs=[] if benchmarks is None else read_jobs(benchmarks),
    )


def _datasets(
    config: Config, ledgers: Iterable[Mapping[str, Any]], manifests: Iterable[Mapping[str, Any]]
) -> list[Dataset]:
    """One Dataset for each in the configuration. Raises RecordError where a file of one is missing."""
    read: dict[str, Mapping[str, Any]] = {}
    answered: dict[str, Mapping[str, Any]] = {}
    for ledger in ledgers:
        (read if ledger["stage"] == "prompts" else answered)[ledger["dataset"]] = ledger
    counts = {manifest["dataset"]: manifest["counts"] for manifest in manifests}
    for kind, found in (("prompts", read), ("samples", answered), ("hidden states", counts)):
        missing = sorted(set(config.datasets) - set(found))
        if missing:
            raise RecordError(
                f"the report lacks the {kind} of {', '.join(missing)}: expected one ledger of prompts, one "
                "ledger of samples and one manifest for each dataset of the configuration"
            )
    return [
        _dataset(name, config.datasets[name].licence, read[name], answered[name], counts[name])
        for name in sorted(config.datasets)
    ]


def _dataset(
    name: str,
    licence: str,
    read: Mapping[str, Any],
    answered: Mapping[str, Any],
    states: Mapping[str, Any],
) -> Dataset:
    left_out = sum(count for reason, count in read["skipped"].items() if reason in WANTED_SKIPS)
    return Dataset(
        name=name,
        licence=licence,
        raw_rows=read["in"],
        prompts=read["kept"],
        samples=answered["kept"],
        tokens=states["tokens"],
        trained_tokens=answered["supervised_tokens"]["train"],
        skipped=Counter(read["skipped"]) + Counter(answered["skipped"]),
        left_out=left_out,
        unusable=sum(read["skipped"].values()) - left_out,
        unanswered=sum(answered["skipped"].values()),
    )


def read_jobs(folder: Path) -> list[Job]:
    """The jobs of Snakemake's benchmark files: `STAGE.tsv`, or `STAGE/DATASET.tsv`.

    The report's own is left out: it's still to be written, or tells of an earlier report.
    """
    jobs = []
    for path in sorted(folder.rglob("*.tsv")):
        stage, subject = (path.stem, "") if path.parent == folder else (path.parent.name, path.stem)
        if stage == "build_report":
            continue
        with path.open(newline="", encoding="utf-8") as file:
            row = next(csv.DictReader(file, delimiter="\t"), None)
        if row is None or "s" not in row:
            raise RecordError(
                f"{path}: expected a benchmark file of Snakemake with a column s. Delete it; the report does "
                "without"
            )
        jobs.append(Job(stage, subject, float(row["s"]), _megabytes(row.get("max_rss"))))
    return jobs


def _megabytes(text: str | None) -> float:
    """A job too short to be looked at has no memory figure."""
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
