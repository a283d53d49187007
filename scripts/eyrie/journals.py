"""Journals: finished work as append-only JSONL under content keys; one writer a file, any number of readers.

They lie below `work/store/`, which no rule declares as its output: they outlive failures, reruns and
Snakemake's clean-ups. Nothing here needs more than Python.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from eyrie.errors import BuildError
from eyrie.records import atomic_write, canonical_json, content_key, sync_directory


class StoreError(BuildError):
    """The store holds something it must not, or somebody else is writing; the message says what to do."""


class Journal:
    """One writer's append-only JSONL file; each row begins with its key.

    A row counts once its line is whole: a torn tail (power loss, SIGKILL) is cut off when the writer opens
    the file again and ignored by readers. Open it with `with`; a second writer is refused.
    """

    def __init__(self, path: Path, mend: bool = True) -> None:
        self.path = path
        self._mend = mend
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._locked()
        if self._mend:
            self._cut_torn_tail()
        sync_directory(self.path.parent)
        return self

    def _locked(self) -> IO[bytes]:
        """The open file under the lock; opened anew where a compaction put another in its place."""
        while True:
            file = self.path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.close()
                raise StoreError(
                    f"{self.path} is being written by another process. Expected one writer: "
                    "wait for the other build, or stop it, and run again."
                ) from error
            if self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                return file
            file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _cut_torn_tail(self) -> None:
        """Drop what follows the last line feed, looking backwards block by block."""
        with self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            whole = end
            while whole > 0:
                start = max(0, whole - _BLOCK)
                file.seek(start)
                newline = file.read(whole - start).rfind(b"\n")
                if newline >= 0:
                    whole = start + newline + 1
                    break
                whole = start
        if whole != end:
            os.truncate(self.path, whole)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows (each with a "key") in one write and one fsync: the group is durable on return."""
        if self._file is None:
            raise StoreError(f"{self.path}: append outside of `with`")
        data = b"".join(_journal_line(row) for row in rows)
        end = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            # Half a group (a full disk) must not become the head of the next line.
            os.truncate(self.path, end)
            raise


_BLOCK = 1 << 16
_KEY_PREFIX = b'{"key":"'


def _journal_line(row: Mapping[str, Any]) -> bytes:
    ordered = {"key": row["key"], **row}
    return json.dumps(ordered, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None where the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("key"), str) else None


def _key_of(line: bytes) -> bytes:
    return line[len(_KEY_PREFIX) : line.find(b'"', len(_KEY_PREFIX))]


def _rows_under(file: IO[bytes], wanted: Set[bytes]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Place, key and row of each whole line under a wanted key; other lines are not parsed."""
    start = 0
    for line in file:
        key = _key_of(line)
        row = _parsed(line) if key in wanted else None
        if row is not None:
            yield start, key.decode(), row
        start += len(line)


def _in_order(folder: Path, pattern: str, first: str | None) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: (path.name != first, path.name))


class FoundRows(Mapping[str, dict[str, Any]]):
    """The rows that journals hold under some keys, read from their files one by one when they are asked for.

    So it takes little memory whatever the rows' size. The files stay open: rows that a compaction moves
    meanwhile are still read from where they were. Close it, or use it with `with`.
    """

    def __init__(self, folder: Path, keys: Iterable[str], pattern: str, first: str | None) -> None:
        wanted = {key.encode() for key in keys}
        self._files: list[IO[bytes]] = []
        self._places: dict[str, tuple[int, int]] = {}
        for path in _in_order(folder, pattern, first):
            self._files.append(path.open("rb"))
            for start, key, _ in _rows_under(self._files[-1], wanted):
                self._places.setdefault(key, (len(self._files) - 1, start))

    def __getitem__(self, key: str) -> dict[str, Any]:
        number, start = self._places[key]
        file = self._files[number]
        file.seek(start)
        return json.loads(file.readline())

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; no row can be read any more."""
        for file in self._files:
            file.close()


def find_rows(
    folder: Path, keys: Iterable[str], pattern: str = "*.jsonl", first: str | None = None
) -> FoundRows:
    """The rows that any writer's journal in the folder holds under the wanted keys.

    The first row under a key wins, in the order of the files' names, the file named `first` before all: an
    answer once in the store is never replaced.
    """
    return FoundRows(folder, keys, pattern, first)


def read_journals(
    folder: Path,
    keys: Iterable[str],
    pattern: str = "*.jsonl",
    counts: Callable[[dict[str, Any]], bool] | None = None,
) -> dict[str, dict[str, Any]]:
    """The rows that any writer's journal in the folder holds under the wanted keys, all in memory.

    Only wanted lines are parsed, so a large store costs a scan and not a parse. The first row under a key
    that `counts` (by default each does) wins, in the order of the files' names.
    """
    wanted = {key.encode() for key in keys}
    found: dict[str, dict[str, Any]] = {}
    for path in _in_order(folder, pattern, None):
        with path.open("rb") as file:
            for _, key, row in _rows_under(file, wanted):
                if counts is None or counts(row):
                    found.setdefault(key, row)
    return found


def journal_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number, from 1, and row of each line; None for a row that is damaged, or torn at the end."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, _parsed(line)


def is_locked(path: Path) -> bool:
    """Whether a writer is at work on a journal just now."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


@contextmanager
def writers_shut_out(paths: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of journals that are to be changed. Raises StoreError where a writer is at work."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(Journal(path, mend=False))
        yield


def rewrite_journal(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> None:
    """Leave only the whole rows that are to be kept, at once and whole; the caller holds the lock."""
    with path.open("rb") as old, atomic_write(path) as new:
        for line in old:
            row = _parsed(line)
            if row is not None and keeps(row):
                new.write(line)


@dataclass(frozen=True)
class Compaction:
    """What a compaction did with one journal's lines."""

    path: Path
    kept: int
    repeated: int
    torn: int


def compact_journal(path: Path) -> Compaction:
    """Rewrite a journal without torn lines and without rows under a key that an earlier row has.

    The new file takes the old one's place at once and whole, under the writer's lock. Rows of other journals
    are not looked at: which of two answers to one prompt is a dataset's own must not change. Raises
    StoreError where a writer is at work.
    """
    seen: set[bytes] = set()
    kept = repeated = torn = 0
    with Journal(path, mend=False), path.open("rb") as old, atomic_write(path) as new:
        for line in old:
            key = _key_of(line)
            if _parsed(line) is None:
                torn += 1
            elif key in seen:
                repeated += 1
            else:
                seen.add(key)
                new.write(line)
                kept += 1
    return Compaction(path, kept, repeated, torn)


def answers_folder(store: Path, recipe: Mapping[str, Any]) -> Path:
    """The folder of the answers made under one recipe (target revision, template, sampling)."""
    return described_folder(store / "answers", recipe)


def answers_key(recipe: Mapping[str, Any]) -> str:
    """The name of that folder."""
    return content_key(recipe)


def described_folder(parent: Path, recipe: Mapping[str, Any]) -> Path:
    """A folder named by the recipe's key, with the recipe itself beside the data for a human reader."""
    folder = parent / content_key(recipe)
    description = folder / "recipe.json"
    if not description.exists():
        with atomic_write(description) as file:
            file.write(canonical_json(recipe).encode() + b"\n")
    return folder
