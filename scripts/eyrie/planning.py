"""What a build has still to do: requests, tokens, hours, bytes; by dataset and in all.

Counted is what lies in the work folder: ledgers, answers in the store, manifests. What is not there yet is
taken from the configuration (caps, expected rows), and what that does not tell is assumed. A figure says
which of these it is, and a sum is as good as the worst of its parts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from eyrie.budget import bytes_per_token, free_bytes
from eyrie.config import Config
from eyrie.journals import answers_key
from eyrie.recipes import ANSWERING_VERSION, answers_recipe
from eyrie.records import read_json, read_jsonl
from eyrie.safe_values import words_of

# How many rows of a file tell how long they are.
_ROWS_LOOKED_AT = 500
_TENSOR = re.compile(r"--(tensor-parallel-size|tp-size|tp)")
_DATA = re.compile(r"--(data-parallel-size|dp-size|dp|pipeline-parallel-size|pp-size)")
_DONE_LINE = re.compile(r"(?:done|stopped): \d+ answers, (\d+) tokens in ([\d.]+) s")


class Source(IntEnum):
    """Where a figure comes from, the best first."""

    COUNTED = 0
    CONFIGURED = 1
    ASSUMED = 2


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: Source

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.value + other.value, max(self.source, other.source))

    def __mul__(self, other: Figure) -> Figure:
        # Nothing times a guess is nothing, for sure.
        if not self.value or not other.value:
            return Figure(0, min(self.source, other.source))
        return Figure(self.value * other.value, max(self.source, other.source))

    def less(self, done: float) -> Figure:
        """What is left of it, at least nothing."""
        return Figure(max(0.0, self.value - done), self.source)

    def __str__(self) -> str:
        return f"{'~' if self.source == Source.ASSUMED else ''}{round(self.value):,}"


NOTHING = Figure(0, Source.COUNTED)


@dataclass(frozen=True)
class Assumptions:
    """What is taken for granted where nothing is counted yet."""

    prompt_tokens: int = 500
    answer_tokens: int = 2_500
    """Of an answer that is not cut; a partition's max_new_tokens cuts it."""
    native_tokens: int = 13_000
    """Of a native conversation that is not left out as too long."""
    characters_per_token: float = 4.0


@dataclass(frozen=True)
class DatasetPlan:
    """What a dataset has still to do."""

    name: str
    kind: str
    done: str
    """The last stage that is finished."""
    rows: Figure
    """Prompts or conversations."""
    answered: int
    """Answers that the store has."""
    requests: Figure
    """Prompts still to be answered."""
    answer_tokens: Figure
    """Tokens still to be generated."""
    capture_tokens: Figure
    """Tokens whose states are still to be made, by whichever pass."""


@dataclass(frozen=True)
class BuildPlan:
    """What the whole build has still to do."""

    datasets: list[DatasetPlan]
    bytes_per_token: int | None
    """Of the states as they stay; None where the target's shape is not known."""
    bytes_on_the_way: int
    """Of what an answering pass leaves until the capture job converts it; 0 where nothing is converted."""
    free: int
    reserve: int
    gpus: int
    rate: float | None
    """Tokens generated a second, by all jobs together."""
    rate_source: str
    training: str
    notes: list[str] = field(default_factory=list)

    def total(self, name: str) -> Figure:
        """The sum of one figure over all datasets."""
        result = NOTHING
        for one in self.datasets:
            result += getattr(one, name)
        return result

    def hours(self, rate: float | None = None) -> float | None:
        """Hours of answering at the rate; None where none is known."""
        rate = rate or self.rate
        return None if not rate else self.total("answer_tokens").value / rate / 3600

    def state_bytes(self) -> Figure | None:
        """What the states will take that are still to be made; with what lies beside them until `make gc`."""
        if self.bytes_per_token is None:
            return None
        way = [one.capture_tokens for one in self.datasets if one.kind == "prompts" and one.requests.value]
        kept = self.total("capture_tokens") * Figure(self.bytes_per_token, Source.COUNTED)
        return kept + sum(way, NOTHING) * Figure(self.bytes_on_the_way, Source.COUNTED)

    def fits(self) -> bool | None:
        """Whether the disk has room for it; None where that can't be said."""
        needed = self.state_bytes()
        return None if needed is None else needed.value <= self.free - self.reserve


def plan_build(config: Config, assumed: Assumptions, rate: float | None = None) -> BuildPlan:
    """The plan of a build. rate: tokens a second, in place of the measured one."""
    target = _read(config.work / config.target.name / "target.json")
    datasets = [_plan_dataset(config, name, target, assumed) for name in sorted(config.datasets)]
    kept, on_the_way = _bytes(config, target)
    measured = measured_rate(config)
    parallel = 1 if config.engine.kind != "in_process" else max(1, _cores() // config.engine.threads)
    source = "given" if rate else "measured in earlier runs" if measured else "unknown"
    return BuildPlan(
        datasets=datasets,
        bytes_per_token=kept,
        bytes_on_the_way=on_the_way,
        free=free_bytes(config.work),
        reserve=config.hidden_states.disk_reserve,
        gpus=gpus_of(config),
        rate=rate or (measured and measured * min(parallel, len(datasets))),
        rate_source=source,
        training=_training(config),
        notes=list(_notes(config)),
    )


def _plan_dataset(
    config: Config, name: str, target: dict[str, Any] | None, assumed: Assumptions
) -> DatasetPlan:
    settings, build = config.datasets[name], config.work / config.target.name
    rows_ledger = _read(config.work / "prompts" / name / "ledger.json")
    samples_ledger = _read(build / "tokenized" / name / "ledger.json")
    manifest = _read(build / "hidden_states" / name / "manifest.json")
    rows = _rows(config, name, rows_ledger)
    answers = _answers(config, name, target)
    asked = settings.kind == "prompts" and samples_ledger is None
    requests = rows.less(answers.count) if asked else NOTHING
    prompt, answer = _prompt_tokens(config, name, assumed), _answer_tokens(config, name, answers, assumed)
    if samples_ledger is not None:
        tokens = Figure(sum(samples_ledger["tokens"].values()), Source.COUNTED)
    else:
        tokens = rows * (prompt + answer if settings.kind == "prompts" else _native(config, name, assumed))
    return DatasetPlan(
        name=name,
        kind=settings.kind,
        done=_stage(
            rows_ledger, samples_ledger, manifest, (config.work / "raw" / name / "source.json").exists()
        ),
        rows=rows,
        answered=answers.count,
        requests=requests,
        answer_tokens=requests * answer,
        capture_tokens=NOTHING if manifest is not None else tokens,
    )


def _stage(rows: object, samples: object, manifest: object, fetched: bool) -> str:
    if manifest is not None:
        return "captured"
    if samples is not None:
        return "tokenized"
    return "selected" if rows is not None else "fetched" if fetched else "nothing"


def _rows(config: Config, name: str, ledger: dict[str, Any] | None) -> Figure:
    if ledger is not None:
        return Figure(ledger["kept"], Source.COUNTED)
    settings = config.datasets[name]
    if settings.samples is not None:
        return Figure(settings.samples, Source.CONFIGURED)
    expected = settings.source.expected_rows
    count = None if expected is None else expected.max or expected.min
    return Figure(count or 0, Source.ASSUMED)


@dataclass(frozen=True)
class _Answers:
    """The answers of a dataset in the store: how many, and the mean length of the last ones."""

    count: int
    mean: float


def _answers(config: Config, name: str, target: dict[str, Any] | None) -> _Answers:
    if target is None or config.datasets[name].kind != "prompts":
        return _Answers(0, 0.0)
    sampling = config.partitions[config.datasets[name].partition]
    folder = answers_key(answers_recipe(target, ANSWERING_VERSION, sampling))
    path = config.work / "store" / "answers" / folder / f"{name}.jsonl"
    if not path.is_file():
        return _Answers(0, 0.0)
    with path.open("rb") as file:
        lines = [line for line in file if line.endswith(b"\n")]
    lengths = [len(json.loads(line)["token_ids"]) for line in lines[-_ROWS_LOOKED_AT:]]
    return _Answers(len(lines), sum(lengths) / max(1, len(lengths)))


def _answer_tokens(config: Config, name: str, answers: _Answers, assumed: Assumptions) -> Figure:
    if answers.count:
        return Figure(answers.mean, Source.COUNTED)
    most = config.partitions[config.datasets[name].partition].max_new_tokens
    return Figure(min(most, assumed.answer_tokens), Source.ASSUMED)


def _prompt_tokens(config: Config, name: str, assumed: Assumptions) -> Figure:
    length = _mean_characters(config.work / "prompts" / name / "prompts.jsonl")
    return Figure(length / assumed.characters_per_token if length else assumed.prompt_tokens, Source.ASSUMED)


def _native(config: Config, name: str, assumed: Assumptions) -> Figure:
    length = _mean_characters(config.work / "prompts" / name / "conversations.jsonl")
    tokens = length / assumed.characters_per_token if length else assumed.native_tokens
    return Figure(min(tokens, config.hidden_states.max_tokens), Source.ASSUMED)


def _mean_characters(path: Path) -> float:
    """Characters of a row's messages in the mean of the first rows; 0 where there is no such file."""
    if not path.is_file():
        return 0.0
    lengths = []
    for row in read_jsonl(path):
        lengths.append(len(json.dumps(row.get("messages", row.get("input_ids")), ensure_ascii=False)))
        if len(lengths) == _ROWS_LOOKED_AT:
            break
    return sum(lengths) / max(1, len(lengths))


def _bytes(config: Config, target: dict[str, Any] | None) -> tuple[int | None, int]:
    """Bytes of a token's states as they stay, and as an answering pass leaves them to be converted."""
    hidden = _hidden_size(config, target)
    if hidden is None:
        return None, 0
    states = config.hidden_states
    kept = bytes_per_token(states, hidden, draft_vocab_size=config.drafter.draft_vocab_size)
    passes = config.engine.kind == "in_process" or config.engine.capture == "answers"
    if states.top_tokens is None or not passes:
        return kept, 0
    return kept, bytes_per_token(states.model_copy(update={"top_tokens": None}), hidden)


def _hidden_size(config: Config, target: dict[str, Any] | None) -> int | None:
    if target is not None:
        return int(target["hidden_size"])
    described = _read(config.target.path / "config.json") or {}
    found = described.get("text_config", described).get("hidden_size")
    if found is None and config.target.shape is not None:
        found = config.target.shape.hidden_size
    return None if found is None else int(found)


def measured_rate(config: Config) -> float | None:
    """Tokens a second of one answering job, over all earlier ones; None where there was none."""
    runs = list(_runs(config.work / "logs" / "answer_prompts"))
    seconds = sum(seconds for _, seconds in runs)
    return sum(tokens for tokens, _ in runs) / seconds if seconds else None


def _runs(folder: Path) -> Iterator[tuple[float, float]]:
    """Tokens and seconds of each dataset's last run that generated anything."""
    for log in sorted(folder.glob("*.log")):
        progress = _read(log.with_suffix(".progress.json"))
        if progress is not None and progress["tokens"]:
            yield progress["tokens"], progress["seconds"]
        elif found := _DONE_LINE.search(log.read_text(encoding="utf-8", errors="replace")):
            yield float(found[1]), float(found[2])


def gpus_of(config: Config) -> int:
    """The GPUs that the server's command asks for, or the trainer's processes on GPUs."""
    trained = config.training.processes if config.training.device == "cuda" else 0
    if config.engine.kind == "in_process" or config.engine.command is None:
        return trained
    words = words_of(config.engine.command)
    sizes = {_TENSOR: 1, _DATA: 1}
    for word, value in _flags(words):
        for pattern in sizes:
            if pattern.fullmatch(word) and value.isdigit():
                sizes[pattern] *= int(value)
    asked = sizes[_TENSOR] * sizes[_DATA]
    return max(asked if asked > 1 else 0, trained)


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Each flag of a command with what stands behind it."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        yield name, value if equals else following


def _training(config: Config) -> str:
    build = config.work / config.target.name / "drafter"
    if (build / "evaluation.json").exists():
        return "trained and evaluated"
    if (build / "checkpoint" / "model.safetensors").exists():
        return "trained, not evaluated"
    return f"to be trained: {config.training.epochs} epochs by {config.training.processes} processes"


def _notes(config: Config) -> Iterator[str]:
    several = [name for name, one in config.datasets.items() if one.turns == "all"]
    if several:
        yield f"{', '.join(several)}: later turns are asked, too, and are not counted here"
    uncapped = [name for name, one in config.datasets.items() if one.samples is None]
    if uncapped:
        yield f"{', '.join(uncapped)}: no cap `samples`, so all rows that the files turn out to hold"


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def as_dict(plan: BuildPlan) -> dict[str, Any]:
    """The plan's figures for another program; `assumed` names those that are guesses."""
    names = ("rows", "requests", "answer_tokens", "capture_tokens")
    needed = plan.state_bytes()
    totals: dict[str, Figure] = {name: plan.total(name) for name in names}
    return {
        **{name: round(figure.value) for name, figure in totals.items()},
        "assumed": sorted(name for name, figure in totals.items() if figure.source == Source.ASSUMED),
        "state_bytes": None if needed is None else round(needed.value),
        "bytes_per_token": plan.bytes_per_token,
        "free_bytes": plan.free,
        "fits": plan.fits(),
        "tokens_per_second": plan.rate,
        "hours": plan.hours(),
        "gpus": plan.gpus,
        "gpu_hours": None if plan.hours() is None else (plan.hours() or 0.0) * plan.gpus,
        "datasets": {
            one.name: {"done": one.done, **{name: round(getattr(one, name).value) for name in names}}
            for one in plan.datasets
        },
    }


def table(lines: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows of cells as text: the first column to the left, the others to the right."""
    rows = list(lines)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        yield "  ".join(cells).rstrip()
