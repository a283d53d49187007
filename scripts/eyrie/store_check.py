"""Whether the store still holds what was put there: every shard, journal and training state is read again.

Nothing here trusts a name: a shard's rows are hashed and compared with what its own header, the index
journals and the manifests say. What is damaged can be set aside, so that the next run makes just that anew.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eyrie.console import Progress
from eyrie.journals import compact_journal, is_locked, journal_rows, rewrite_journal, writers_shut_out
from eyrie.records import RecordError, content_key, read_json
from eyrie.store import INDEXES, StateRef, read_rows

DAMAGED = "damaged"
_UNREADABLE = (SafetensorError, OSError, KeyError, ValueError, TypeError)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file, and the keys of the samples that it concerns."""

    file: Path
    problem: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flaw:
    """What is wrong with a shard, or (`in_index`) with what its index says of it; key: of which sample."""

    problem: str
    key: str | None = None
    in_index: bool = False


def check_shard(path: Path, refs: Sequence[StateRef]) -> list[Flaw]:
    """Read a whole shard again. refs: what the index journals say of it."""
    try:
        with safe_open(path, framework="pt") as handle:
            return list(_flaws(path, handle, refs))
    except _UNREADABLE as error:
        return [Flaw(f"cannot be read as a shard of hidden states: {error}")]


def _flaws(path: Path, handle: Any, refs: Sequence[StateRef]) -> Iterator[Flaw]:
    metadata = handle.metadata()
    recipe = json.loads(metadata["recipe"])
    held = [
        StateRef(key, path.name, start, tokens, sha256)
        for key, start, tokens, sha256 in json.loads(metadata["samples"])
    ]
    named = f"{content_key([ref.sha256 for ref in held])}.safetensors"
    if content_key(recipe) != path.parent.name or named != path.name:
        yield Flaw("its header is not the one that it was written with")
    lengths = {name: handle.get_slice(name).get_shape()[0] for name in handle.keys()}  # noqa: SIM118
    if {*lengths.values()} != {total := sum(ref.tokens for ref in held)}:
        yield Flaw(f"its samples have {total} tokens, its tensors {lengths} rows")
    for ref in held:
        stored = read_rows(handle, ref.start, ref.tokens)
        if (digest := stored.digest()) != ref.sha256:
            yield Flaw(
                f"the bytes are not those that were stored: sha256 {digest}, was {ref.sha256}", ref.key
            )
        elif content_key(recipe, stored.token_ids) != ref.key:
            yield Flaw("the tokens are not those of its key", ref.key)
        elif not stored.is_finite():
            yield Flaw("holds numbers that are not finite", ref.key)
    for ref in refs:
        if ref not in held:
            yield Flaw("the index says of it what its shard does not", ref.key, in_index=True)


@dataclass
class IndexedFolder:
    """The shards of one recipe, what its index journals say, and what was found to be wrong."""

    path: Path
    rows: list[StateRef] = field(default_factory=list)
    """All journals' rows, in the order in which a reader takes them."""
    journals: dict[StateRef, Path] = field(default_factory=dict)
    torn: set[Path] = field(default_factory=set)
    """Journals with damaged lines."""
    bad_shards: set[str] = field(default_factory=set)
    bad_rows: set[StateRef] = field(default_factory=set)

    def there(self) -> set[str]:
        """The names of the shards that are there and not damaged."""
        return {path.name for path in self.path.glob("*.safetensors")} - self.bad_shards

    def sound(self) -> dict[str, StateRef]:
        """Where a reader finds each sample, damaged shards and rows aside."""
        there = self.there()
        found: dict[str, StateRef] = {}
        for row in self.rows:
            if row.shard in there and row not in self.bad_rows:
                found.setdefault(row.key, row)
        return found

    def of_shards(self) -> dict[str, list[StateRef]]:
        """The rows by shard; shards that no row names are there, too."""
        shards: dict[str, list[StateRef]] = {
            path.name: [] for path in sorted(self.path.glob("*.safetensors"))
        }
        for row in self.rows:
            shards.setdefault(row.shard, []).append(row)
        return shards

    def is_damaged(self) -> bool:
        """Whether there is something to set aside, or a row that leads nowhere."""
        lost = {row.shard for row in self.rows} - self.there()
        return bool(self.torn or self.bad_shards or self.bad_rows or lost)

    def set_aside(self, aside: Path) -> None:
        """Move damaged shards away and drop the rows that name no sound one.

        Raises StoreError where a writer is at work.
        """
        journals = sorted(self.path.glob(INDEXES))
        with writers_shut_out(journals):
            for name in sorted(self.bad_shards):
                _move(self.path / name, aside / self.path.name)
            there = self.there()
            for journal in journals:
                rewrite_journal(journal, lambda row: self._is_sound(row, there))

    def _is_sound(self, row: Mapping[str, Any], there: set[str]) -> bool:
        ref = _ref(row)
        return ref is not None and ref.shard in there and ref not in self.bad_rows


class StoreCheck:
    """One pass over the store below a work folder; `faults` is what it found."""

    def __init__(self, work: Path, log: logging.Logger) -> None:
        self.work = work
        self.store = work / "store"
        self.aside = self.store / DAMAGED
        self.faults: list[Fault] = []
        self._log = log
        self._names: dict[str, str] = {}
        """Of each sample: its row and dataset, as a manifest has them, or else its journal's dataset."""
        self._manifests: dict[Path, list[dict[str, Any]]] = {}
        self._bad_files: list[Path] = []
        """Files that are no good as a whole, and are made anew or written again where they are missing."""
        self._torn_answers: list[Path] = []
        self._folders: list[IndexedFolder] = []
        self._sound: dict[str, StateRef] = {}
        """Where each sample lies undamaged."""

    def run(self) -> None:
        """Read everything."""
        self._read_manifests()
        for path in sorted(self.store.glob("hidden_states/*/")):
            self._folders.append(self._read_indexes(path))
        self._check_shards()
        for folder in self._folders:
            self._check_missing(folder)
        self._check_manifests()
        self._check_recipes()
        self._check_answers()
        self._check_drafters()

    def lines(self) -> Iterator[str]:
        """One line a fault: file, sample and dataset, problem."""
        for fault in self.faults:
            about = f"{self._describe(fault.keys)}: " if fault.keys else ""
            yield f"{fault.file}: {about}{fault.problem}"

    def mend(self) -> None:
        """Set what is damaged aside, below store/damaged, and remove the manifests that vouch for it.

        Raises StoreError where a writer is at work.
        """
        for folder in self._folders:
            if folder.is_damaged():
                folder.set_aside(self.aside / "hidden_states")
        for path in self._torn_answers:
            copy = self.aside / path.relative_to(self.store)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
            compact_journal(path)
        for path in self._bad_files:
            base = self.store if path.is_relative_to(self.store) else self.work
            _move(path, self.aside / path.relative_to(base).parent)
        for path in self._broken_manifests():
            path.unlink()
            self._log.info("removed %s, which vouched for what is damaged; the next run makes it anew", path)

    def _read_manifests(self) -> None:
        for path in sorted(self.work.glob("*/hidden_states/*/manifest.json")):
            try:
                document = read_json(path)
                samples = [
                    (one["key"], one["tokens"], one["sha256"], one["id"]) for one in document["samples"]
                ]
                self._manifests[path] = document["samples"]
                for key, *_, row in samples:
                    self._names.setdefault(key, f"row {row} of dataset {document['dataset']}")
            except (RecordError, KeyError, TypeError) as error:
                self._bad(path, f"is no manifest of hidden states: {error}")

    def _bad(self, path: Path, problem: str) -> None:
        self.faults.append(Fault(path, problem))
        self._bad_files.append(path)

    def _read_indexes(self, path: Path) -> IndexedFolder:
        folder = IndexedFolder(path)
        for journal in sorted(path.glob(INDEXES)):
            dataset = journal.stem.removeprefix("index-")
            for number, row in journal_rows(journal):
                ref = None if row is None else _ref(row)
                if ref is not None:
                    folder.rows.append(ref)
                    folder.journals.setdefault(ref, journal)
                    self._names.setdefault(ref.key, f"dataset {dataset}")
                elif not is_locked(journal):
                    folder.torn.add(journal)
                    self.faults.append(
                        Fault(journal, f"line {number} is torn or damaged: its sample counts as not captured")
                    )
        return folder

    def _check_shards(self) -> None:
        """All shards, several at once: hashing leaves Python's lock alone."""
        tasks = [
            (folder, folder.path / name, refs)
            for folder in self._folders
            for name, refs in folder.of_shards().items()
            if (folder.path / name).exists()
        ]
        sizes = {path: path.stat().st_size for _, path, _ in tasks}
        progress = Progress(sum(sizes.values()), "bytes of shards", self._log)
        found: dict[Path, list[Flaw]] = {}
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            futures = {pool.submit(check_shard, path, refs): path for _, path, refs in tasks}
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                progress.advance(sizes[futures[future]])
        seconds = progress.close()
        total = sum(sizes.values())
        self._log.info("read %d shards, %d bytes in %.1f s", len(tasks), total, seconds)
        for folder, path, refs in tasks:
            self._note(folder, path, refs, found[path])
        self._sound = {key: ref for folder in self._folders for key, ref in folder.sound().items()}

    def _note(
        self, folder: IndexedFolder, path: Path, refs: Sequence[StateRef], flaws: Sequence[Flaw]
    ) -> None:
        for flaw in flaws:
            if flaw.in_index:
                rows = [ref for ref in refs if ref.key == flaw.key]
                folder.bad_rows.update(rows)
                self.faults.append(Fault(folder.journals[rows[0]], flaw.problem, (rows[0].key,)))
                continue
            folder.bad_shards.add(path.name)
            keys = tuple(ref.key for ref in refs) if flaw.key is None else (flaw.key,)
            self.faults.append(Fault(path, flaw.problem, keys))

    def _check_missing(self, folder: IndexedFolder) -> None:
        """Shards that an index names and that are not there, unless their samples lie elsewhere, too."""
        for name, refs in folder.of_shards().items():
            lost = tuple(ref.key for ref in refs if ref.key not in self._sound)
            if lost and not (folder.path / name).exists():
                self.faults.append(Fault(folder.path / name, "this shard is not there", lost))

    def _check_manifests(self) -> None:
        """Samples that a manifest vouches for and the store has not, or has otherwise."""
        # Samples beside a damaged one are sound, but go with its shard.
        known = {row.key for folder in self._folders for row in folder.rows if row.shard in folder.bad_shards}
        known |= {key for fault in self.faults for key in fault.keys}
        for path, samples in self._manifests.items():
            lost = [one["key"] for one in samples if not self._holds(one) and one["key"] not in known]
            if lost:
                self.faults.append(Fault(path, "the store does not hold what it vouches for", tuple(lost)))

    def _holds(self, sample: Mapping[str, Any]) -> bool:
        ref = self._sound.get(sample["key"])
        return ref is not None and (ref.sha256, ref.tokens) == (sample["sha256"], sample["tokens"])

    def _broken_manifests(self) -> list[Path]:
        return [path for path, samples in self._manifests.items() if not all(map(self._holds, samples))]

    def _check_recipes(self) -> None:
        for path in sorted(self.store.glob("*/*/recipe.json")):
            try:
                told = content_key(read_json(path))
            except RecordError as error:
                told = str(error)
            if told != path.parent.name:
                self._bad(path, f"is not the recipe that its folder is named after: {told}")

    def _check_answers(self) -> None:
        for path in sorted(self.store.glob("answers/*/*.jsonl")):
            damaged = [number for number, row in journal_rows(path) if row is None]
            if damaged and not is_locked(path):
                self._torn_answers.append(path)
                self.faults += [
                    Fault(path, f"line {number} is torn or damaged: its answer is asked for again")
                    for number in damaged
                ]

    def _check_drafters(self) -> None:
        for path in sorted(self.store.glob("drafters/**/*.safetensors")):
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 - no mapping
                        handle.get_slice(name).get_shape()
            except _UNREADABLE as error:
                self._bad(path, f"cannot be read as the state of a training: {error}")

    def _describe(self, keys: Sequence[str]) -> str:
        first = f"sample {keys[0]}" + (f" ({self._names[keys[0]]})" if keys[0] in self._names else "")
        return first if len(keys) == 1 else f"{len(keys)} samples, the first one {first}"


def _ref(row: Mapping[str, Any]) -> StateRef | None:
    """The reference of an index row; None where the row is damaged."""
    try:
        ref = StateRef(**row)
    except TypeError:
        return None
    whole = isinstance(ref.shard, str) and isinstance(ref.start, int) and isinstance(ref.tokens, int)
    return ref if whole and isinstance(ref.sha256, str) else None


def _move(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path.replace(folder / path.name)
