"""The rows to train on, joined with their states in the store and checked against the manifests.

A row's small facts (its tokens, its loss mask, the target's choices) stay in memory, 9 bytes a token at most.
Its states, thousands of bytes a token, are read when they are needed; what fits a fixed bound is kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eyrie.config import HiddenStatesSettings
from eyrie.console import Progress
from eyrie.eagle3.batches import Sample, candidate_places, target_choices
from eyrie.eagle3.processes import Processes
from eyrie.encoding import Encoded, decode, encode
from eyrie.gates import GateError
from eyrie.records import RecordError, content_key, read_json, read_jsonl
from eyrie.states import states_recipe
from eyrie.store import StateRef, States, StateStore, StoreError
from eyrie.top_tokens import vocabulary_digest

_CHOICE_ROWS = 512
# States that are kept once they are read; of more, each epoch reads the rest again.
_KEPT_BYTES = 2 << 30


@dataclass(frozen=True)
class Row:
    """A tokenized row of the splits that training looks at, and the key of its states.

    token_ids: int32 [T]. loss_mask: bool [T]. supervision: the key of what is supervised, and how.
    """

    key: str
    id: str
    dataset: str
    group: str
    split: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    greedy: bool
    supervision: str

    def identity(self) -> list[str]:
        """What of the row the trained drafter depends on."""
        return [self.split, self.key, self.supervision]


@dataclass(frozen=True)
class Captures:
    """What the manifests say together: how the states were captured and each sample's digest by key."""

    layer_ids: list[int]
    hidden_size: int
    vocab_size: int
    recipe: dict[str, Any]
    digests: dict[str, str]


def read_captures(paths: Sequence[Path], target: Mapping[str, Any]) -> Captures:
    """Read the manifests. Raises GateError where they disagree with one another or with target.json."""
    seen: dict[str, Path] = {}
    digests: dict[str, str] = {}
    captures = None
    for path in sorted(paths):
        manifest = read_json(path)
        captured = HiddenStatesSettings(
            layer_ids=manifest["layer_ids"], dtype=manifest["dtype"], top_tokens=manifest.get("top_tokens")
        )
        compute, vocabulary = manifest["recipe"]["dtype"], manifest.get("draft_vocabulary")
        recipe = states_recipe(target, captured, compute, vocabulary)
        captures = Captures(
            manifest["layer_ids"], manifest["hidden_size"], target["vocab_size"], recipe, digests
        )
        seen.setdefault(content_key(recipe, manifest["hidden_size"]), path)
        digests.update({sample["key"]: sample["sha256"] for sample in manifest["samples"]})
        width = len(manifest["layer_ids"]) * target["hidden_size"]
        if manifest["hidden_size"] != target["hidden_size"] or manifest["width"] != width:
            raise GateError(
                f"{path}: states of {manifest['width']} numbers for layers {manifest['layer_ids']}; expected "
                f"{width}, the layers times the target's {target['hidden_size']}. Capture them anew."
            )
    if captures is None:
        raise GateError("no manifest of hidden states was given; expected one a dataset")
    if len(seen) > 1:
        raise GateError(
            "the manifests were captured differently (layer ids, dtypes, top tokens):\n"
            + "\n".join(f"  {path}" for path in seen.values())
            + "\n  expected one way for all; run the hidden_states target again"
        )
    return captures


def check_draft_vocabulary(captures: Captures, token_ids: Sequence[int]) -> None:
    """Refuse states whose top tokens are of another vocabulary than the drafter's. Raises GateError."""
    expected = captures.recipe.get("draft_vocabulary")
    if expected is not None and expected != vocabulary_digest(token_ids):
        raise GateError(
            f"the manifests hold top tokens of the draft vocabulary {expected}; this one, of "
            f"{len(token_ids)} tokens, is {vocabulary_digest(token_ids)}\n"
            "  expected one vocabulary: a stored token is a row of it\n"
            "  change: run the hidden_states target again; what the store can convert is not captured anew"
        )


def read_rows(
    paths: Sequence[Path],
    states: StateStore,
    captures: Captures,
    splits: Sequence[str] = ("train", "validation"),
) -> list[Row]:
    """The rows of these splits, ordered by content. Raises GateError and StoreError in words."""
    rows = []
    for path in sorted(paths):
        for row in read_jsonl(path):
            if row["split"] not in splits:
                continue
            _check_row(row, path, captures.vocab_size)
            ids, mask, greedy = row["input_ids"], row["loss_mask"], row["greedy"]
            rows.append(
                Row(
                    key=states.key(ids),
                    id=row["id"],
                    dataset=row["dataset"],
                    group=row["group"],
                    split=row["split"],
                    token_ids=torch.tensor(ids, dtype=torch.int32),
                    loss_mask=torch.tensor(mask, dtype=torch.bool),
                    greedy=greedy,
                    supervision=content_key(mask, greedy),
                )
            )
    unknown = [row for row in rows if row.key not in captures.digests]
    if unknown:
        raise StoreError(
            f"{len(unknown)} of {len(rows)} rows have no hidden states in the manifests, the first one "
            f"{unknown[0].id} of dataset {unknown[0].dataset}.\n  expected a manifest of every dataset, made "
            "from these tokens with this target\n  change: run the hidden_states target again"
        )
    if "train" in splits and not any(row.split == "train" for row in rows):
        raise GateError(
            f"no row to train on among {len(rows)} (held-out rows aside)\n  expected at least one of the "
            "train split\n  change: more samples, or split.validation and split.held_out"
        )
    return sorted(rows, key=Row.identity)


def _check_row(row: Mapping[str, Any], path: Path, vocab_size: int) -> None:
    ids, mask = row["input_ids"], row["loss_mask"]
    if len(ids) != len(mask):
        raise RecordError(f"{path}: row {row['id']} has {len(ids)} tokens and a mask of {len(mask)}")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RecordError(
            f"{path}: row {row['id']} has token ids from {min(ids)} to {max(ids)}; expected ids from 0 to "
            f"{vocab_size - 1}, the target's vocabulary. Was it tokenized for another target?"
        )


class CheckedStates:
    """The states of rows, read from the store and held to what the manifests vouch for.

    Each sample is checked when it is first read, before anything is learnt from it. Some may be read by
    another thread meanwhile. Raises StoreError where states of the rows are missing.
    """

    def __init__(
        self, rows: Sequence[Row], states: StateStore, captures: Captures, kept_bytes: int = _KEPT_BYTES
    ) -> None:
        self._states, self._captures = states, captures
        self._refs = self._find(rows)
        self._checked: set[str] = set()
        self._kept: dict[str, States] = {}
        self._room = kept_bytes
        self._lock = threading.Lock()

    def _find(self, rows: Sequence[Row]) -> dict[str, StateRef]:
        refs = self._states.find({row.key for row in rows})
        missing = [row for row in rows if row.key not in refs]
        if missing:
            raise StoreError(
                f"{self._states.folder}: the states of {len(missing)} of {len(rows)} rows are gone, the "
                f"first ones of row {missing[0].id} of dataset {missing[0].dataset}.\n  expected all that "
                "the manifests name\n  change: delete that dataset's manifest and run again; only what is "
                "missing is captured"
            )
        return refs

    def load(self, rows: Sequence[Row]) -> list[States]:
        """The rows' states, in their order; a shard that several lie in is opened once."""
        found = {row.key: self._kept[row.key] for row in rows if row.key in self._kept}
        wanted = {row.key: row for row in rows if row.key not in found}
        refs = sorted((self._refs[key] for key in wanted), key=lambda ref: (ref.shard, ref.start))
        for ref, encoded in zip(refs, self._read(refs, wanted), strict=True):
            states = decode(encoded, self._captures.digests[ref.key])
            if ref.key not in self._checked:
                shard = self._states.folder / ref.shard
                _check_states(wanted[ref.key], encoded, states, self._captures, shard)
                self._checked.add(ref.key)
            self._keep(ref.key, states)
            found[ref.key] = states
        return [found[row.key] for row in rows]

    def _read(self, refs: Sequence[StateRef], rows: Mapping[str, Row]) -> Iterator[Encoded]:
        """What is stored under the references. Raises StoreError that names the row of a damaged shard."""
        count = 0
        try:
            for encoded in self._states.read(refs):
                yield encoded
                count += 1
        except StoreError as error:
            row = rows[refs[count].key]
            raise StoreError(
                f"the hidden states of row {row.id} of dataset {row.dataset}: {error}"
            ) from error

    def _keep(self, key: str, states: States) -> None:
        """Keep states while there is room. An epoch reads each once, so none is worth more than another."""
        size = sum(tensor.nbytes for tensor in encode(states).tensors.values())
        with self._lock:
            if size <= self._room and key not in self._kept:
                self._kept[key] = states
                self._room -= size


def _check_states(row: Row, encoded: Encoded, states: States, captures: Captures, shard: Path) -> None:
    """Hold what was read to the row and the manifest. Raises StoreError."""
    width = len(captures.layer_ids) * captures.hidden_size
    last = captures.hidden_size if states.last is None else states.last.shape[1]
    digest, expected = encoded.digest(), captures.digests[row.key]
    problem = None
    if states.aux.shape[1] != width or last != captures.hidden_size:
        problem = (
            f"are {states.aux.shape[1]} numbers wide and the last one {last}; expected {width}, the "
            f"{len(captures.layer_ids)} captured layers side by side, and {captures.hidden_size}"
        )
    elif digest != expected:
        problem = f"have digest {digest}; the manifest says {expected}"
    elif states.token_ids != row.token_ids.tolist():
        problem = "were captured from other tokens"
    elif not encoded.is_finite():
        problem = "hold numbers that are not finite"
    if problem:
        raise StoreError(
            f"{shard}: the hidden states of row {row.id} of dataset {row.dataset} {problem}.\n"
            "  change: `python scripts/verify_store.py` sets damaged shards aside; the next run then "
            "captures their samples anew"
        )


def _check_last_row(row: Row, states: States) -> None:
    """A server that leaves states as it answers has none for an answer's last token: the row is empty."""
    if not states.aux[-1].any():
        raise StoreError(
            f"the hidden states of row {row.id} of dataset {row.dataset} have no row for the last token: "
            "they were left by the pass that answered\n  expected a row for each token, since every "
            "mask_shift but aligned learns the prediction past the end, too\n  change: training.mask_shift: "
            "aligned, or engine.capture: server and another folder `work`, and capture anew"
        )


class StoredSamples(Sequence[Sample]):
    """Rows as samples whose states are read when a sample is asked for.

    choices: the target's most likely token at each of a row's candidate places.
    """

    def __init__(
        self, rows: Sequence[Row], choices: Sequence[torch.Tensor], states: CheckedStates, mask_shift: str
    ) -> None:
        self._rows, self._choices = rows, choices
        self._states, self._mask_shift = states, mask_shift

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """The sample at an index, with its states; those of a slice are so many StoredSamples."""
        if isinstance(index, slice):
            return StoredSamples(self._rows[index], self._choices[index], self._states, self._mask_shift)
        return self.load([index])[0]

    def lengths(self) -> list[int]:
        """The number of tokens of each sample."""
        return [len(row.token_ids) for row in self._rows]

    def bare(self, index: int) -> Sample:
        """A sample without its states: tensors of T rows and no column stand for them."""
        row = self._rows[index]
        nothing = torch.empty(len(row.token_ids), 0)
        return Sample(
            key=row.key,
            token_ids=row.token_ids.long(),
            loss_mask=row.loss_mask,
            aux=nothing,
            last=nothing,
            candidates=candidate_places(row.loss_mask, self._mask_shift),
            choices=self._choices[index].long(),
        )

    def load(self, indices: Sequence[int]) -> list[Sample]:
        """The samples at the indices, with their states."""
        rows = [self._rows[index] for index in indices]
        loaded = self._states.load(rows)
        if self._mask_shift != "aligned":
            for row, states in zip(rows, loaded, strict=True):
                _check_last_row(row, states)
        return [
            replace(self.bare(index), aux=states.aux, last=states.last, top=states.top)
            for index, states in zip(indices, loaded, strict=True)
        ]


def find_choices(
    rows: Sequence[Row],
    states: CheckedStates,
    head: torch.Tensor,
    mask_shift: str,
    processes: Processes,
    log: logging.Logger,
) -> list[torch.Tensor]:
    """The target's most likely token at each of a row's candidate places: int32, row by row.

    head: the target's, [V, H]. A greedy answer tells its own; for the others the states are read once, each
    process its share of the rows.
    """
    share = range(processes.rank, len(rows), processes.count)
    found = _choices_of([rows[index] for index in share], states, head, mask_shift, log)
    return [choices for _, choices in sorted(processes.gather(list(zip(share, found, strict=True))))]


def _choices_of(
    rows: Sequence[Row], states: CheckedStates, head: torch.Tensor, mask_shift: str, log: logging.Logger
) -> list[torch.Tensor]:
    places = [candidate_places(row.loss_mask, mask_shift) for row in rows]
    choices = [_told_choices(row, place) for row, place in zip(rows, places, strict=True)]
    gaps = [choice < 0 for choice in choices]
    progress = Progress(sum(int(gap.sum()) for gap in gaps), "target choices", log)
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def last_states() -> Iterator[torch.Tensor]:
        for row, choice, gap, place in zip(rows, choices, gaps, places, strict=True):
            if not gap.any():
                continue
            (found,) = states.load([row])
            if found.last is None:
                assert found.top is not None
                choice[gap] = found.top.choices[place[gap]]
            else:
                asked.append((choice, gap))
                yield found.last[place[gap]]

    answers: list[torch.Tensor] = []
    for chunk in _chunks(last_states(), _CHOICE_ROWS):
        answers.extend(target_choices(chunk, head, _CHOICE_ROWS))
        progress.advance(len(chunk))
    seconds = progress.close()
    if answers:
        parts = torch.split(torch.cat(answers).cpu().int(), [int(gap.sum()) for _, gap in asked])
        for (choice, gap), part in zip(asked, parts, strict=True):
            choice[gap] = part
        log.info("found the target's choices at %d positions in %.0f s", sum(map(len, parts)), seconds)
    return choices


def _chunks(tensors: Iterable[torch.Tensor], rows: int) -> Iterator[torch.Tensor]:
    """The rows of all the tensors in turn, in tensors of that many rows; the last one may have fewer."""
    waiting: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        waiting.append(tensor)
        count += len(tensor)
        if count >= rows:
            *whole, rest = torch.split(torch.cat(waiting), rows)
            if len(rest) == rows:
                whole, rest = [*whole, rest], rest[:0]
            yield from whole
            waiting, count = [rest], len(rest)
    if count:
        yield torch.cat(waiting)


def _told_choices(row: Row, places: torch.Tensor) -> torch.Tensor:
    """The target's most likely token at the places, where a greedy answer tells it; -1 elsewhere."""
    told = torch.full((len(row.token_ids) + 1,), -1, dtype=torch.int32)
    if row.greedy:
        told[:-1] = torch.where(row.loss_mask, row.token_ids, -1)
    return told[places + 1]
