"""Copies of raw files, whole or of some parquet columns: each appears finished or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from eyrie.records import RecordError, atomic_write, sha256_file


def copy_file(source: Path, target: Path) -> Path:
    """Copy a file, unless its copy is there already."""
    if target.exists() and (target.samefile(source) or sha256_file(target) == sha256_file(source)):
        return target
    with source.open("rb") as reading, atomic_write(target) as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
    return target


def has_columns(path: Path, columns: list[str]) -> bool:
    """Whether a parquet file is there and holds at least these columns."""
    try:
        return path.is_file() and set(columns) <= set(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return False


def copy_columns(name: str, source: IO[bytes], columns: list[str], target: Path) -> Path:
    """Copy some columns of a parquet file, one group of rows at a time; of a remote file no more is read.

    The columns keep the types that the file declares: nothing is guessed from values. name: the file's, for
    errors. Raises RecordError for a column there is not, or a damaged file.
    """
    try:
        reader = pq.ParquetFile(source)
        there = reader.schema_arrow
        missing = [column for column in columns if column not in there.names]
        if missing:
            raise RecordError(
                f"{name}: saw no column {', '.join(missing)} of source.columns, but {', '.join(there.names)}"
            )
        schema = pa.schema([there.field(column) for column in columns])
        with atomic_write(target) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for number in range(reader.num_row_groups):
                table = reader.read_row_group(number, columns=columns).select(columns)
                writer.write_table(table.replace_schema_metadata(None))
    except pa.ArrowException as error:
        raise RecordError(f"{name}: is a damaged parquet file ({error})") from error
    return target
