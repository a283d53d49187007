"""Rows that share text with a benchmark: whoever trains on them measures what was learnt by heart.

The index is plain and exact: every run of n words of every benchmark prompt (`eyrie.words` says what a word
is). A prompt shorter than n words counts as a whole: only a text of just these words shares it.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from eyrie.config import ConfigError, DecontaminationSettings, config_line
from eyrie.layouts.base import SkipRow, column
from eyrie.raw_files import Format, RawError, rows
from eyrie.records import RecordError, sha256_file
from eyrie.words import words_of

_FORMATS = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Benchmarks:
    """The runs of words of some benchmarks' prompts."""

    def __init__(self, dataset: str, settings: DecontaminationSettings) -> None:
        """Raises ConfigError for a pattern that names no file or an ending that is not known, RecordError
        for a file that cannot be read or holds no prompt."""
        where = config_line(["datasets", dataset, "decontaminate", "files"])
        self._length = settings.ngram
        self._runs: set[str] = set()
        self._whole: set[str] = set()
        self._files = _existing(settings.files, where)
        for path in self._files:
            prompts = _prompts(path, _format(path, where), settings.fields)
            if not sum(self._add(words_of(text)) for text in prompts):
                raise RecordError(f"{path}: holds no text, so no benchmark prompt")

    def _add(self, words: list[str]) -> bool:
        """Note a prompt; whether it has words at all."""
        if len(words) >= self._length:
            self._runs.update(_runs(words, self._length))
        elif words:
            self._whole.add(" ".join(words))
        return bool(words)

    def shared(self, texts: Iterable[str]) -> str | None:
        """The first run of words that one of the texts shares with a benchmark, or None."""
        for text in texts:
            words = words_of(text)
            if len(words) < self._length:
                whole = " ".join(words)
                if whole in self._whole:
                    return whole
            for run in _runs(words, self._length):
                if run in self._runs:
                    return run
        return None

    def described(self) -> list[dict[str, str]]:
        """The files and their digests, for the ledger."""
        return [{"name": str(path), "sha256": sha256_file(path)} for path in self._files]


def _runs(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))


def _existing(patterns: list[str], where: str) -> list[Path]:
    found: set[str] = set()
    for pattern in patterns:
        names = [name for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
        if not names:
            raise ConfigError(f"{where}: saw {pattern!r}, which names no file seen from {Path.cwd()}")
        found.update(names)
    return [Path(name) for name in sorted(found)]


def _format(path: Path, where: str) -> Format:
    plain = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    if plain.suffix not in _FORMATS:
        raise ConfigError(f"{where}: saw {path.name}, expected a file of {', '.join(_FORMATS)}")
    return cast("Format", _FORMATS[plain.suffix])


def _prompts(path: Path, file_format: Format, fields: list[str] | None) -> Iterator[str]:
    for position, row in rows([path], file_format):
        if isinstance(row, RawError):
            raise RecordError(f"{path} at {position}: {row.message}; a benchmark must be read whole")
        try:
            values = [row] if fields is None else [column(row, name) for name in fields]
        except SkipRow as error:
            raise RecordError(
                f"{path} at {position}: {error.reason}; decontaminate.fields names the columns of the prompts"
            ) from error
        for value in values:
            yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
