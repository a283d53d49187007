"""The bytes of a raw file, compressed or not, and what they cannot be."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from eyrie.config import MAX_EXPANSION
from eyrie.records import RecordError

BOM = b"\xef\xbb\xbf"
PARQUET_MAGIC = b"PAR1"
_BUFFER = 1 << 18
# A compressed file that becomes no larger than this is never refused for it.
_HARMLESS = 64 << 20
_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
_NOT_DATA = {
    b"version https://git-lfs": "a Git-LFS pointer, not the data; run `git lfs pull` where it was cloned, "
    "or download the file itself",
    b"<!doctype html": "a web page, most likely an error or a login page; download the file itself",
    b"<html": "a web page, most likely an error or a login page; download the file itself",
    b"\x1f\x8b": "gzip-compressed; let its name end in .gz, or decompress it (gunzip)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; let its name end in .zst, or decompress it (unzstd)",
    b"PK\x03\x04": "a zip archive; unpack it first (unzip)",
    b"BZh": "bzip2-compressed; decompress it first (bunzip2)",
    b"\xfd7zXZ\x00": "xz-compressed; decompress it first (unxz)",
}


def most_bytes(path: Path, max_expansion: int) -> int:
    """How many bytes a file may become."""
    return max(_HARMLESS, max_expansion * path.stat().st_size)


def check_expansion(path: Path, size: int, max_expansion: int) -> None:
    """Refuse a file whose `size` unpacked bytes are far more than it could hold in earnest.

    Raises RecordError.
    """
    if size > most_bytes(path, max_expansion):
        packed = path.stat().st_size
        raise RecordError(
            f"{path}: {packed:,} bytes unpack to {size:,} or more, over {max_expansion} times as many\n"
            "  expected: text, which packs to a tenth, or to a fiftieth where it repeats itself; what is "
            "made to fill memory or a disk looks so\n"
            "  change: unpack it and look at it; if it is right, raise source.max_expansion"
        )


class _Bounded(io.RawIOBase):
    """Unpacked bytes, counted while they are read. Raises RecordError once there are too many."""

    def __init__(self, stream: Any, path: Path, max_expansion: int) -> None:
        self._stream = stream
        self._path = path
        self._max_expansion = max_expansion
        self._size, self._most = 0, most_bytes(path, max_expansion)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._size += len(data)
        if self._size > self._most:
            check_expansion(self._path, self._size, self._max_expansion)
        return len(data)


@contextmanager
def open_bytes(path: Path, max_expansion: int = MAX_EXPANSION) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed where its name ends in .gz or .zst.

    max_expansion: how many times as large as itself a file may become. Raises RecordError where one becomes
    larger, cannot be read, or where the compressed data is damaged or cut off.
    """
    try:
        with path.open("rb", _BUFFER) as file:
            if path.suffix == ".gz":
                stream: Any = gzip.GzipFile(fileobj=file)
            elif path.suffix == ".zst":
                stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
            else:
                yield file
                return
            yield cast("IO[bytes]", io.BufferedReader(_Bounded(stream, path, max_expansion), _BUFFER))
    except (OSError, EOFError, zlib.error) as error:
        if path.suffix in _MAGIC and path.is_file():
            raise RecordError(
                f"{path}: the compressed data is damaged or cut off ({error}); fetch it again"
            ) from error
        raise RecordError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def first_bytes(path: Path) -> bytes:
    """The first bytes of the data, byte-order mark and white space aside.

    Raises RecordError for an empty file, for what is never data, and for a name that promises a compression
    which the file lacks.
    """
    magic = _MAGIC.get(path.suffix)
    if magic is not None:
        with path.open("rb") as file:
            if not file.read(len(magic)) == magic:
                raise RecordError(
                    f"{path}: is not compressed as its name says; rename it without {path.suffix}"
                )
    with open_bytes(path) as data:
        head = data.read(1024)
    start = head.removeprefix(BOM).lstrip()
    if not start:
        raise RecordError(f"{path}: is empty; an interrupted download leaves such files: fetch it again")
    for sign, words in _NOT_DATA.items():
        if start.lower().startswith(sign.lower()):
            raise RecordError(f"{path}: is {words}")
    return start
