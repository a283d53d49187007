"""Raw files, row by row: JSON lines, a JSON array, CSV, parquet or plain text, none of them trusted.

A record that cannot be read is handed on with its place, so that it is counted; a file that is not what it
should be stops the build, with what to do about it. JSON, CSV and text may be compressed: .gz, .zst.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from eyrie.config import MAX_EXPANSION
from eyrie.json_items import json_items
from eyrie.raw_bytes import (
    BOM,
    PARQUET_MAGIC,
    check_expansion,
    first_bytes,
    open_bytes,
)
from eyrie.records import JsonError, RecordError, parse_json_strictly

Format = Literal["jsonl", "json", "csv", "parquet", "text"]
Record = tuple[str, Any]
"""A place (file and line, item or row) and what stands there; a RawError where it cannot be read."""

# The longest line, cell or text that is read, in bytes. An agent's trajectory takes a few megabytes; what
# exceeds this is a file of another kind, or one whose line ends were lost, and would take all memory.
LONGEST_RECORD = 64 << 20
_SHOWN_OF_LONG = 1_000
# Rows turned into Python objects at once; an agent's trajectory may hold a megabyte.
_PARQUET_BATCH = 64
_ROWS_DESCRIBED = 1_000
# Bytes of JSON lines parsed at once. Parsed one by one, each in turn with what becomes of the row, short
# lines take a quarter longer: the processor's caches hold the one or the other.
_LINES_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class RawError:
    """A record that cannot be read."""

    reason: str
    """What the ledger counts: bad_json:<rule> or bad_csv:<rule>."""
    message: str
    """What was wrong with it."""
    text: str
    """The record as it stands in the file, or the beginning of one that is too long."""


def rows(
    paths: Iterable[Path],
    file_format: Format,
    columns: Collection[str] | None = None,
    max_expansion: int = MAX_EXPANSION,
) -> Iterator[Record]:
    """All records of the files.

    columns: of parquet files, read these alone (those that are there); None reads all. max_expansion: see
    open_bytes. A value that is no object is handed on as it is: which rows are usable is the layout's matter.
    Raises RecordError.
    """
    for group in row_groups(paths, file_format, columns, max_expansion):
        yield from group


def row_groups(
    paths: Iterable[Path],
    file_format: Format,
    columns: Collection[str] | None = None,
    max_expansion: int = MAX_EXPANSION,
) -> Iterator[list[Record]]:
    """The same, some at a time: steps that take several rows each are faster than steps in turn."""
    for path in paths:
        check_file(path, file_format)
        if file_format == "parquet":
            yield from _parquet_rows(path, columns, max_expansion)
        else:
            with open_bytes(path, max_expansion) as file:
                yield from _READERS[file_format](path, file)


def column_names(paths: Iterable[Path], file_format: Format) -> list[str]:
    """The columns that parquet files declare; other formats declare none."""
    if file_format != "parquet":
        return []
    return sorted({name for path in paths for name in _open_parquet(path).schema_arrow.names})


def check_file(path: Path, file_format: Format) -> None:
    """Refuse a file that cannot be of the format, by its first bytes. Raises RecordError."""
    is_parquet = first_bytes(path).startswith(PARQUET_MAGIC)
    if (file_format == "parquet") != is_parquet:
        seen = "a parquet file" if is_parquet else "no parquet file"
        raise RecordError(f"{path}: is {seen}, but source.format says {file_format}; change source.format")
    if is_parquet and path.suffix in (".gz", ".zst"):
        raise RecordError(
            f"{path}: parquet is compressed in itself and is read from its end; unpack it first"
        )


def _json_lines(path: Path, file: IO[bytes]) -> Iterator[list[Record]]:
    """Only the line feed ends a line; a byte-order mark and blank lines are tolerated."""
    name, number = path.name, 0
    while lines := _some_lines(file):
        if number == 0:
            lines[0] = lines[0].removeprefix(BOM)
            _refuse_document(path, lines[0])
        group: list[Record] = []
        for number, line in enumerate(lines, start=number + 1):  # noqa: B020 - goes on where it was
            if len(line) > LONGEST_RECORD:
                group.append((f"{name}:{number}", _too_long(line, file)))
            elif not line.isspace():
                group.append((f"{name}:{number}", _strict(line)))
        yield group


def _some_lines(file: IO[bytes]) -> list[bytes]:
    """The next few lines, or one long one; one that is too long is the last, and the rest of it is unread."""
    lines: list[bytes] = []
    size = 0
    while size < min(_LINES_AT_ONCE, LONGEST_RECORD) and (line := file.readline(LONGEST_RECORD + 1)):
        lines.append(line)
        size += len(line)
    return lines


def _too_long(line: bytes, file: IO[bytes]) -> RawError:
    """Skips the rest of the line."""
    start, length = line[:_SHOWN_OF_LONG].decode("utf-8", errors="replace"), len(line)
    while line and not line.endswith(b"\n"):
        line = file.readline(1 << 20)
        length += len(line)
    message = f"{length} bytes in one line; at most {LONGEST_RECORD} are read"
    return RawError("bad_json:long_line", message, start)


def _refuse_document(path: Path, first_line: bytes) -> None:
    """A first line that opens what it does not close is the beginning of a document of many lines."""
    opens = first_line.startswith(b"[") or first_line.strip() == b"{"
    if opens and len(first_line) <= LONGEST_RECORD and isinstance(_strict(first_line), RawError):
        raise RecordError(
            f"{path}: begins like one JSON document of many lines, but source.format says jsonl; "
            "change it to json"
        )


def _strict(line: bytes) -> Any:
    """The line's value. Only a file's last line lacks the line feed: there a fault is taken for a cut-off."""
    try:
        return parse_json_strictly(line)
    except JsonError as error:
        kind, message = error.kind, str(error)
    except RecursionError:
        kind, message = "too_deep", "lists or objects nested too deep"
    except ValueError as error:
        message = str(error)
        cut_off = not line.endswith(b"\n") and "Extra data" not in message
        kind = "truncated_last_line" if cut_off else "syntax"
    return RawError(f"bad_json:{kind}", message, line.decode("utf-8", errors="replace").rstrip("\n"))


def _json_items(path: Path, file: IO[bytes]) -> Iterator[list[Record]]:
    """The items of one array; a file that is one object is one record."""
    text_file = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        for number, (text, value) in enumerate(json_items(text_file)):
            if isinstance(value, JsonError):
                value = RawError(f"bad_json:{value.kind}", str(value), _readable(text))
            yield [(f"{path.name}[{number}]", value)]
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{path}: expected one JSON array, but: {error}; a cut-off download ends so, and a file of one "
            "object a line needs source.format: jsonl"
        ) from error


def _readable(text: str) -> str:
    return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def _csv_records(path: Path, file: IO[bytes]) -> Iterator[list[Record]]:
    """Records of comma-separated cells (RFC 4180) under the names in the first; an empty cell is null.

    Every other cell stays the text it is: no number, date or truth value is guessed.
    """
    csv.field_size_limit(LONGEST_RECORD)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    names = _csv_names(path, reader)
    while True:
        place = f"{path.name}:{reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            kind = "long_cell" if "limit" in str(error) else "quotes"
            yield [(place, RawError(f"bad_csv:{kind}", str(error), ""))]
            continue
        if cells is None:
            return
        if cells:
            yield [(place, _csv_row(names, cells))]


def _csv_names(path: Path, reader: Iterator[list[str]]) -> list[str]:
    try:
        names = next(reader)
    except csv.Error as error:
        raise RecordError(f"{path}: expected a first line with the columns' names, but: {error}") from error
    seen = ", ".join(repr(_readable(name)) for name in names)
    if len(names) == 1 and any(sign in names[0] for sign in ";\t"):
        raise RecordError(f"{path}: expected commas between the cells, saw {seen}; write it with commas")
    if len(set(names)) < len(names) or "" in names or not _readable(seen).isprintable():
        raise RecordError(
            f"{path}: expected a first line with the columns' names, each given once and filled, saw {seen}"
        )
    return names


def _csv_row(names: list[str], cells: list[str]) -> Any:
    if len(cells) != len(names):
        message = f"{len(cells)} cells under {len(names)} names"
        return RawError("bad_csv:cells", message, _readable(",".join(cells)))
    if not all(cell.isascii() or _is_text(cell) for cell in cells):
        return RawError("bad_csv:not_utf8", "bytes that are not UTF-8", _readable(",".join(cells)))
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole_text(path: Path, file: IO[bytes]) -> Iterator[list[Record]]:
    """The file as one record, a string."""
    data = file.read(LONGEST_RECORD + 1)
    if len(data) > LONGEST_RECORD:
        raise RecordError(f"{path}: holds more than {LONGEST_RECORD} bytes; expected one conversation")
    try:
        yield [(path.name, data.removeprefix(BOM).decode("utf-8"))]
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: expected text in UTF-8, but: {error}") from error


_READERS = {"jsonl": _json_lines, "json": _json_items, "csv": _csv_records, "text": _whole_text}


def _open_parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: is a damaged parquet file ({error}); fetch it again") from error


def _parquet_rows(path: Path, columns: Collection[str] | None, max_expansion: int) -> Iterator[list[Record]]:
    file = _open_parquet(path)
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    check_expansion(path, sum(group.total_byte_size for group in groups), max_expansion)
    names = [name for name in file.schema_arrow.names if columns is None or name in columns]
    number = 0
    try:
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=names, use_threads=False):
            group = [(f"{path.name}[{at}]", row) for at, row in enumerate(batch.to_pylist(), start=number)]
            number += len(group)
            yield group
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
        if isinstance(raw, dict):
            self._columns.update(dict.fromkeys(raw))
        for value in raw.values() if isinstance(raw, dict) else [raw]:
            for turn in value if isinstance(value, list) else ():
                for key in ("role", "from"):
                    if isinstance(turn, dict) and isinstance(turn.get(key), str):
                        self._roles[f"{key}={turn[key]:.40}"] += 1

    def __str__(self) -> str:
        columns = ", ".join(list(self._columns)[:30]) or "none"
        return f"  columns seen: {columns}\n{self.roles()}"

    def roles(self) -> str:
        """The speakers' names as the file has them."""
        roles = ", ".join(f"{role} {count}" for role, count in self._roles.most_common(12)) or "none"
        return f"  roles seen in the first {_ROWS_DESCRIBED} rows: {roles}"
