"""What the report tells, read from the build's files into one value."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyrie.config import Config, parse_config
from eyrie.gates import WANTED_SKIPS
from eyrie.lengths import Lengths, read_lengths
from eyrie.records import RecordError, ledgers_by_dataset, read_json
from eyrie.report.training_curves import TrainingCurves, read_curves
from eyrie.trace import TRAINING, Trace, walk

# Reasons for which a prompt got no answer; all other reasons of that stage left an answer out.
_UNANSWERED = ("failed:", "prompt_too_long", "template_error")


@dataclass(frozen=True)
class Dataset:
    """One dataset's way from raw rows to what training learns from.

    prompts: rows that were selected. answered: those that have an answer, their own for a native dataset.
    samples, trained: rows of tokenized_data.jsonl, in all and in the training share. tokens: of all samples,
    prompts included. trained_tokens: supervised tokens of the training share. skipped: for each stage the
    rows by reason; in sum left_out (duplicates, rows over the cap), unusable (while reading) and unanswered
    (without a usable sample).
    """

    name: str
    partition: str
    licence: str
    raw_rows: int
    prompts: int
    answered: int
    samples: int
    trained: int
    tokens: int
    trained_tokens: int
    skipped: dict[str, dict[str, int]]
    left_out: int
    unusable: int
    unanswered: int

    @property
    def funnel(self) -> list[tuple[str, int]]:
        """Rows by stage, from the raw file to training."""
        return [
            ("raw", self.raw_rows),
            ("kept", self.prompts),
            ("answered", self.answered),
            ("samples", self.samples),
            ("trained", self.trained),
        ]


@dataclass(frozen=True)
class Job:
    """One job's wall time, from Snakemake's benchmark file: stage, what it worked on, seconds."""

    stage: str
    subject: str
    seconds: float
    peak_mb: float


@dataclass(frozen=True)
class Evidence:
    """Figures of commands that not every build runs; None where they were not run.

    stale: the files that tell of another drafter than this one.
    """

    acceptance: dict[str, Any] | None = None
    scaling: dict[str, Any] | None = None
    serving: dict[str, Any] | None = None
    stale: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Build:
    """A whole build's evidence. lengths: of every sample, by dataset."""

    config: Config
    checkpoint: Path
    datasets: list[Dataset]
    lengths: dict[str, Lengths]
    manifests: list[dict[str, Any]]
    vocabulary: dict[str, Any]
    training: dict[str, Any]
    curves: TrainingCurves
    evaluation: dict[str, Any]
    trace: Trace
    jobs: list[Job]
    evidence: Evidence


def read_build(
    config: Path,
    ledgers: Iterable[Path],
    tokenized: Iterable[Path],
    manifests: Iterable[Path],
    vocabulary: Path,
    checkpoint: Path,
    training_log: Path,
    evaluation: Path,
    benchmarks: Path | None,
    evidence: Mapping[str, Path],
) -> Build:
    """Read everything; datasets come in the order of their names. Raises RecordError and ConfigError.

    evidence: the files that are there of acceptance, scaling and serving.
    """
    settings = parse_config(read_json(config))
    states = sorted((read_json(path) for path in manifests), key=lambda manifest: manifest["dataset"])
    judged = read_json(evaluation)
    return Build(
        config=settings,
        checkpoint=checkpoint,
        datasets=_datasets(settings, [read_json(path) for path in ledgers], states),
        lengths={path.parent.name: read_lengths(path) for path in sorted(tokenized)},
        manifests=states,
        vocabulary=read_json(vocabulary),
        training=read_json(checkpoint / TRAINING),
        curves=read_curves(training_log),
        evaluation=judged,
        trace=walk(checkpoint, settings, look=False),
        jobs=[] if benchmarks is None else read_jobs(benchmarks),
        evidence=_evidence(evidence, judged),
    )


def _datasets(
    config: Config, ledgers: Iterable[Mapping[str, Any]], manifests: Iterable[Mapping[str, Any]]
) -> list[Dataset]:
    """One Dataset for each in the configuration. Raises RecordError where a file of one is missing."""
    read, answered = ledgers_by_dataset(ledgers)
    counts = {manifest["dataset"]: manifest["counts"] for manifest in manifests}
    for kind, found in (("prompts", read), ("samples", answered), ("hidden states", counts)):
        missing = sorted(set(config.datasets) - set(found))
        if missing:
            raise RecordError(
                f"the report lacks the {kind} of {', '.join(missing)}: expected one ledger of prompts, one "
                "ledger of samples and one manifest for each dataset of the configuration"
            )
    return [
        _dataset(config, name, read[name], answered[name], counts[name]) for name in sorted(config.datasets)
    ]


def _dataset(
    config: Config,
    name: str,
    read: Mapping[str, Any],
    answered: Mapping[str, Any],
    states: Mapping[str, Any],
) -> Dataset:
    settings = config.datasets[name]
    left_out = sum(count for reason, count in read["skipped"].items() if reason in WANTED_SKIPS)
    without_answer = sum(
        count for reason, count in answered["skipped"].items() if reason.startswith(_UNANSWERED)
    )
    return Dataset(
        name=name,
        partition="native" if settings.kind == "native" else settings.partition,
        licence=settings.licence,
        raw_rows=read["in"],
        prompts=read["kept"],
        answered=read["kept"] - without_answer,
        samples=sum(answered["samples"].values()),
        trained=answered["samples"]["train"],
        tokens=states["tokens"],
        trained_tokens=answered["supervised_tokens"]["train"],
        skipped={"reading": read["skipped"], "answering": answered["skipped"]},
        left_out=left_out,
        unusable=sum(read["skipped"].values()) - left_out,
        unanswered=sum(answered["skipped"].values()),
    )


def _evidence(files: Mapping[str, Path], evaluation: Mapping[str, Any]) -> Evidence:
    found = {name: read_json(path) for name, path in files.items()}
    judged = _drafter_digest(evaluation)
    stale = [
        files[name].name
        for name, figures in found.items()
        if (digest := _drafter_digest(figures)) is not None and digest != judged
    ]
    return Evidence(**found, stale=stale)


def _drafter_digest(figures: Mapping[str, Any]) -> str | None:
    """The digest of the drafter that figures tell of; None where they don't record it."""
    parents = figures.get("parents", {})
    return next(
        (digest for path, digest in parents.items() if path.endswith("checkpoint/model.safetensors")), None
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
