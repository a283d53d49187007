"""Raw files, row by row: JSON lines, a JSON array, or parquet, none of them trusted.

A record that cannot be read is handed on with its place, so that it is counted; a file that is not what it
should be stops the build, with what to do about it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from eyrie.records import RecordError, parse_json_strictly

Format = Literal["jsonl", "json", "parquet"]

# Rows turned into Python objects at once; an agent's trajectory may hold a megabyte.
_PARQUET_BATCH = 64
_PIECE = 1 << 20
_AFTER_VALUE = frozenset(" \t\r\n,]")
_ROWS_DESCRIBED = 1_000
_BOM = b"\xef\xbb\xbf"

_PARQUET_MAGIC = b"PAR1"
_NOT_DATA = {
    b"version https://git-lfs": "a Git-LFS pointer, not the data; run `git lfs pull` where it was cloned, "
    "or download the file itself",
    b"<!doctype html": "a web page, most likely an error or a login page; download the file itself",
    b"<html": "a web page, most likely an error or a login page; download the file itself",
    b"\x1f\x8b": "gzip-compressed; decompress it first (gunzip)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; decompress it first (unzstd)",
    b"PK\x03\x04": "a zip archive; unpack it first (unzip)",
}


@dataclass(frozen=True)
class RawError:
    """A record that is no JSON."""

    reason: str
    """What the ledger counts."""
    message: str
    """What was wrong with it."""
    text: str
    """The record as it stands in the file."""


def rows(
    paths: Iterable[Path], file_format: Format, columns: Collection[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """All records of the files, each with its place (file and line, item or row).

    columns: of parquet files, read these alone (those that are there); None reads all. A value that is no
    object is handed on as it is: which rows are usable is the layout's matter. Raises RecordError.
    """
    for path in paths:
        check_file(path, file_format)
        if file_format == "jsonl":
            yield from _json_lines(path)
        elif file_format == "json":
            yield from _json_items(path)
        else:
            yield from _parquet_rows(path, columns)


def column_names(paths: Iterable[Path], file_format: Format) -> list[str]:
    """The columns that parquet files declare; other formats declare none."""
    if file_format != "parquet":
        return []
    return sorted({name for path in paths for name in _open_parquet(path).schema_arrow.names})


def check_file(path: Path, file_format: Format) -> None:
    """Refuse a file that cannot be of the format, by its first bytes. Raises RecordError."""
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    start = head.removeprefix(_BOM).lstrip()
    if not start:
        raise RecordError(f"{path}: is empty; an interrupted download leaves such files: fetch it again")
    for magic, words in _NOT_DATA.items():
        if start.lower().startswith(magic.lower()):
            raise RecordError(f"{path}: is {words}")
    if (file_format == "parquet") != start.startswith(_PARQUET_MAGIC):
        seen = "no parquet file" if file_format == "parquet" else "a parquet file"
        raise RecordError(f"{path}: is {seen}, but source.format says {file_format}; change source.format")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Only the line feed ends a line; a byte-order mark and blank lines are tolerated."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if not line.strip():
                continue
            value = _strict(line)
            if number == 1 and isinstance(value, RawError):
                _refuse_document(path, line.strip())
            yield f"{path.name}:{number}", value


def _refuse_document(path: Path, first_line: bytes) -> None:
    """A first line that opens what it does not close is the beginning of a document of many lines."""
    if first_line.startswith(b"[") or first_line == b"{":
        raise RecordError(
            f"{path}: begins like one JSON document of many lines, but source.format says jsonl; "
            "change it to json"
        )


def _strict(data: bytes) -> Any:
    try:
        return parse_json_strictly(data)
    except (ValueError, RecursionError) as error:
        return RawError("bad_json", str(error), data.decode("utf-8", errors="replace").rstrip("\n"))


def _json_items(path: Path) -> Iterator[tuple[str, Any]]:
    """The items of one array, read piece by piece; a file that is one object is one record."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, text in enumerate(_item_texts(file)):
                yield f"{path.name}[{number}]", _strict(text.encode())
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{path}: expected one JSON array, but: {error}; a cut-off download ends so, and a file of one "
            "object a line needs source.format: jsonl"
        ) from error


def _item_texts(file: IO[str]) -> Iterator[str]:
    """The text of each item of the array in a file. Raises ValueError."""
    text = _Text(file)
    if text.peek() != "[":
        yield text.take_value()
    else:
        text.skip()
        while text.peek() != "]":
            yield text.take_value()
            if text.peek() == ",":
                text.skip()
                if text.peek() == "]":
                    raise ValueError("a comma before the closing bracket")
            elif text.peek() != "]":
                raise ValueError(f"expected a comma or the closing bracket, saw {text.peek() or 'the end'!r}")
        text.skip()
    if text.peek():
        raise ValueError(f"more follows after the end: {text.peek()!r}")


class _Text:
    """A file's text from the place that was reached; more is read when it is needed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._buffer = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is no white space, or "" at the end of the file."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in " \t\r\n":
                    return self._buffer[self._at]
                self._at += 1
            if not self._more():
                return ""

    def skip(self) -> None:
        """Step over the character that peek returned."""
        self._at += 1

    def take_value(self) -> str:
        """The text of the JSON value that starts here. Raises ValueError."""
        self.peek()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._buffer, self._at)
                # "10." is where the buffer ends in the middle of 10.5: only what follows shows a value's end.
                if self._buffer[end : end + 1] in _AFTER_VALUE or not self._more():
                    text, self._at = self._buffer[self._at : end], end
                    return text
            except ValueError:
                if not self._more():
                    raise

    def _more(self) -> bool:
        """Read on, twice as far the longer the unread text is, so that a long value stays cheap."""
        self._buffer = self._buffer[self._at :]
        self._at = 0
        piece = self._file.read(max(_PIECE, len(self._buffer)))
        self._buffer += piece
        return bool(piece)


def _open_parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: is a damaged parquet file ({error}); fetch it again") from error


def _parquet_rows(path: Path, columns: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    file = _open_parquet(path)
    names = [name for name in file.schema_arrow.names if columns is None or name in columns]
    number = 0
    try:
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=names, use_threads=False):
            for row in batch.to_pylist():
                yield f"{path.name}[{number}]", row
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: is a damaged parquet file after row {number} ({error})") from error


class Seen:
    """What the first rows look like, whatever layout they were taken for: columns, roles, counts."""

    def __init__(self, columns: list[str]) -> None:
        self._rows = 0
        self._columns = dict.fromkeys(columns)
        self._roles: Counter[str] = Counter()

    def note(self, raw: Any) -> None:
        """Look at a row."""
        self._rows += 1
        if self._rows > _ROWS_DESCRIBED:
            return
        if isinstance(raw, Mapping):
            self._columns.update(dict.fromkeys(raw))
        for value in raw.values() if isinstance(raw, Mapping) else [raw]:
            for turn in value if isinstance(value, list) else ():
                for key in ("role", "from"):
                    if isinstance(turn, Mapping) and isinstance(turn.get(key), str):
                        self._roles[f"{key}={turn[key]:.40}"] += 1

    def __str__(self) -> str:
        columns = ", ".join(list(self._columns)[:30]) or "none"
        roles = ", ".join(f"{role} {count}" for role, count in self._roles.most_common(12)) or "none"
        return f"  columns seen: {columns}\n  roles seen in the first {_ROWS_DESCRIBED} rows: {roles}"
