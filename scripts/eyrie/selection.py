"""Which readable rows are selected: by what they say and by their hash, never by their place in the file.

A prompt that occurs twice is taken once. Where there are more than wanted, those of the lowest hash are
taken: a row added to the file moves few others, and a larger cap keeps what a smaller one kept.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eyrie.near_duplicates import NearDuplicates

Row = dict[str, Any]


class Left(NamedTuple):
    """A row that was not selected."""

    reason: str
    id: str
    position: str
    """Its place in the raw file."""


class Selection(ABC):
    """Takes rows one by one, and tells each that goes, be it the one just offered or an earlier one."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()

    def offer(self, row: Row, position: str, notes: list[str]) -> Left | None:
        """Take a row, and tell which one goes for it, if any; of equal prompts the first is kept."""
        row_id = bytes.fromhex(row["id"])
        if row_id in self._ids:
            return Left("duplicate_prompt", row["id"], position)
        self._ids.add(row_id)
        return self._take(row, position, notes)

    @abstractmethod
    def _take(self, row: Row, position: str, notes: list[str]) -> Left | None:
        """Take a row whose prompt is new."""

    @abstractmethod
    def finish(self) -> Iterator[Left]:
        """Decide about all rows that were offered, once there are no more."""

    @abstractmethod
    def _selected(self) -> list[tuple[Row, list[str]]]:
        """The selected rows, each with what was mended in it."""

    def in_order(self) -> list[Row]:
        """The selected rows by id."""
        return sorted((row for row, _ in self._selected()), key=lambda row: row["id"])

    def notes(self) -> Counter[str]:
        """How many selected rows were mended, by what was done."""
        return Counter(note for _, notes in self._selected() for note in notes)


class LowestHashes(Selection):
    """The rows of the lowest hashes, as many as there may be; no others stay in memory."""

    def __init__(self, cap: int | None) -> None:
        super().__init__()
        self._cap = cap
        # The highest hash first, as it is the next to go; ids differ, so no comparison reaches the rest.
        self._heap: list[tuple[int, str, str, Row, list[str]]] = []

    def _take(self, row: Row, position: str, notes: list[str]) -> Left | None:
        ranked = (-int.from_bytes(_rank(row["id"])), row["id"], position, row, notes)
        if self._cap is None or len(self._heap) < self._cap:
            heapq.heappush(self._heap, ranked)
            return None
        _, gone, place, _, _ = heapq.heappushpop(self._heap, ranked)
        return Left("over_cap", gone, place)

    def finish(self) -> Iterator[Left]:
        """Nothing is left to decide."""
        yield from ()

    def _selected(self) -> list[tuple[Row, list[str]]]:
        return [(row, notes) for *_, row, notes in self._heap]


class InTurn(Selection):
    """Rows judged beside those already selected, in rising order of their hashes.

    That order is known only when all rows were seen, and any of them may be wanted: they wait on disk.
    """

    def __init__(
        self, folder: Path, cap: int | None, max_per_group: int | None, near: NearDuplicates | None
    ) -> None:
        """folder: where the rows wait, in a file without a name."""
        super().__init__()
        self._cap = cap
        self._max_per_group = max_per_group
        self._near = near
        self._groups: Counter[str] = Counter()
        self._kept: list[tuple[Row, list[str]]] = []
        self._waiting: list[tuple[bytes, int]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - finish() closes it

    def _take(self, row: Row, position: str, notes: list[str]) -> None:
        self._waiting.append((_rank(row["id"]), self._file.tell()))
        line = json.dumps([row, position, notes], ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode() + b"\n")

    def finish(self) -> Iterator[Left]:
        """Take the rows in their turn until there are enough; closes the file of the waiting ones."""
        with self._file as file:
            for _, offset in sorted(self._waiting):
                file.seek(offset)
                row, position, notes = json.loads(file.readline())
                reason = self._reason_against(row)
                if reason is not None:
                    yield Left(reason, row["id"], position)
                else:
                    self._groups[row["group"]] += 1
                    self._kept.append((row, notes))

    def _reason_against(self, row: Row) -> str | None:
        if self._cap is not None and len(self._kept) >= self._cap:
            return "over_cap"
        if self._max_per_group is not None and self._groups[row["group"]] >= self._max_per_group:
            return "over_group_cap"
        if self._near is not None and self._near.repeats(prompt_text(row)):
            return "near_duplicate"
        return None

    def _selected(self) -> list[tuple[Row, list[str]]]:
        return self._kept


def prompt_text(row: Row) -> str:
    """What a row asks: its first user turn, or all where all are asked, or the token ids before the first
    supervised one, as words."""
    if "input_ids" in row:
        length = row["loss_mask"].index(1)
        return " ".join(map(str, row["input_ids"][:length]))
    questions = [made["content"] for made in row["messages"] if made["role"] == "user"]
    return "\n".join(questions) if "turns" in row else questions[0]


def _rank(row_id: str) -> bytes:
    """The hash that decides who is taken; apart from the id, which other choices are made by.

    It is content_key("sample", row_id), without the detour by hex digits.
    """
    return hashlib.sha256(b'["sample","%b"]' % row_id.encode()).digest()[:16]
