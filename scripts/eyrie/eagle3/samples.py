"""The rows to train on, joined with their states in the store and checked against the manifests."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyrie.config import HiddenStatesSettings
from eyrie.console import Progress
from eyrie.eagle3.batches import Sample, candidate_places, target_choices
from eyrie.gates import GateError
from eyrie.records import RecordError, content_key, read_json, read_jsonl
from eyrie.states import states_recipe
from eyrie.store import States, StateStore, StoreError

_CHOICE_ROWS = 512


@dataclass(frozen=True)
class Row:
    """A tokenized row of the splits that training looks at, and the key of its states."""

    key: str
    id: str
    dataset: str
    split: str
    token_ids: list[int]
    loss_mask: list[int]
    greedy: bool

    def identity(self) -> list[str]:
        """What of the row the trained drafter depends on."""
        return [self.split, self.key, content_key(self.loss_mask, self.greedy)]


@dataclass(frozen=True)
class Captures:
    """What the manifests say together: how the states were captured and each sample's digest by key."""

    layer_ids: list[int]
    hidden_size: int
    recipe: dict[str, Any]
    digests: dict[str, str]


def read_captures(paths: Sequence[Path], target: Mapping[str, Any]) -> Captures:
    """Read the manifests. Raises GateError where they disagree with one another or with target.json."""
    seen: dict[str, Path] = {}
    digests: dict[str, str] = {}
    captures = None
    for path in sorted(paths):
        manifest = read_json(path)
        captured = HiddenStatesSettings(layer_ids=manifest["layer_ids"], dtype=manifest["dtype"])
        recipe = states_recipe(target, captured, manifest["recipe"]["dtype"])
        captures = Captures(manifest["layer_ids"], manifest["hidden_size"], recipe, digests)
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
            "the manifests were captured differently (layer ids, dtypes):\n"
            + "\n".join(f"  {path}" for path in seen.values())
            + "\n  expected one way for all; run the hidden_states target again"
        )
    return captures


def read_rows(paths: Sequence[Path], states: StateStore, captures: Captures) -> list[Row]:
    """The train and validation rows, ordered by content. Raises GateError and StoreError in words."""
    rows = []
    for path in sorted(paths):
        for row in read_jsonl(path):
            if row["split"] == "held_out":
                continue
            ids, mask = row["input_ids"], row["loss_mask"]
            if len(ids) != len(mask):
                raise RecordError(f"{path}: row {row['id']} has {len(ids)} tokens and a mask of {len(mask)}")
            rows.append(
                Row(states.key(ids), row["id"], row["dataset"], row["split"], ids, mask, row["greedy"])
            )
    unknown = [row for row in rows if row.key not in captures.digests]
    if unknown:
        raise StoreError(
            f"{len(unknown)} of {len(rows)} rows have no hidden states in the manifests, the first one "
            f"{unknown[0].id} of dataset {unknown[0].dataset}.\n  expected a manifest of every dataset, made "
            "from these tokens with this target\n  change: run the hidden_states target again"
        )
    if not any(row.split == "train" for row in rows):
        raise GateError(
            f"no row to train on among {len(rows)} (held-out rows aside)\n  expected at least one of the "
            "train split\n  change: more samples, or split.validation and split.held_out"
        )
    return sorted(rows, key=Row.identity)


def load_samples(
    rows: Sequence[Row],
    states: StateStore,
    captures: Captures,
    head: torch.Tensor,
    mask_shift: str,
    log: logging.Logger,
) -> list[Sample]:
    """The rows with their states and the target's choices, in the rows' order.

    head: the target's, [V, H]. Raises StoreError for states that are missing or not what the manifest
    vouches for.
    """
    refs = states.find({row.key for row in rows})
    missing = [row for row in rows if row.key not in refs]
    if missing:
        raise StoreError(
            f"{states.folder}: the states of {len(missing)} of {len(rows)} rows are gone, the first ones of "
            f"row {missing[0].id} of dataset {missing[0].dataset}.\n  expected all that the manifests name"
            "\n  change: delete that dataset's manifest and run again; only what is missing is captured"
        )
    by_shard = sorted(refs.values(), key=lambda ref: (ref.shard, ref.start))
    loaded = dict(zip((ref.key for ref in by_shard), states.load(by_shard), strict=True))
    masks, places = [], []
    for row in rows:
        _check_states(row, loaded[row.key], captures.digests[row.key])
        if mask_shift == "legacy":
            _check_last_row(row, loaded[row.key])
        masks.append(torch.tensor(row.loss_mask, dtype=torch.bool))
        places.append(candidate_places(masks[-1], mask_shift))
    choices = [_told_choices(row, place) for row, place in zip(rows, places, strict=True)]
    unknown = [choice < 0 for choice in choices]
    found = _all_choices(
        [loaded[row.key].last[place[gap]] for row, place, gap in zip(rows, places, unknown, strict=True)],
        head,
        log,
    )
    for choice, gap, answer in zip(choices, unknown, found, strict=True):
        choice[gap] = answer
    return [
        Sample(
            key=row.key,
            token_ids=torch.tensor(row.token_ids, dtype=torch.int64),
            loss_mask=mask,
            aux=loaded[row.key].aux,
            last=loaded[row.key].last,
            candidates=place,
            choices=choice,
        )
        for row, mask, place, choice in zip(rows, masks, places, choices, strict=True)
    ]


def _check_states(row: Row, states: States, expected: str) -> None:
    problem = None
    if states.digest() != expected:
        problem = f"have digest {states.digest()}; the manifest says {expected}"
    elif states.token_ids != row.token_ids:
        problem = "were captured from other tokens"
    elif not (states.aux.isfinite().all() and states.last.isfinite().all()):
        problem = "hold numbers that are not finite"
    if problem:
        raise StoreError(
            f"the hidden states of row {row.id} of dataset {row.dataset} {problem}.\n"
            "  change: delete its shard from the store and the dataset's manifest, and run again"
        )


def _check_last_row(row: Row, states: States) -> None:
    """A server that leaves states as it answers has none for an answer's last token: the row is empty."""
    if not states.aux[-1].any():
        raise StoreError(
            f"the hidden states of row {row.id} of dataset {row.dataset} have no row for the last token: "
            "they were left by the pass that answered\n  expected a row for each token, since with "
            "mask_shift: legacy the prediction past the end is learnt, too\n  change: training.mask_shift: "
            "aligned, or engine.capture: server and another folder `work`, and capture anew"
        )


def _told_choices(row: Row, places: torch.Tensor) -> torch.Tensor:
    """The target's most likely token at the places, where a greedy answer tells it; -1 elsewhere."""
    told = torch.full((len(row.token_ids) + 1,), -1)
    if row.greedy:
        ids, mask = torch.tensor(row.token_ids), torch.tensor(row.loss_mask, dtype=torch.bool)
        told[:-1] = torch.where(mask, ids, -1)
    return told[places + 1]


def _all_choices(
    states: Sequence[torch.Tensor], head: torch.Tensor, log: logging.Logger
) -> list[torch.Tensor]:
    """The target's most likely token at each of the states, found once for the whole training."""
    every = torch.cat(list(states))
    progress = Progress(len(every), "target choices", log)
    choices = []
    for choice in target_choices(every, head, _CHOICE_ROWS):
        choices.append(choice)
        progress.advance(len(choice))
    seconds = progress.close()
    log.info("found the target's choices at %d positions in %.0f s", len(every), seconds)
    return list(torch.split(torch.cat(choices), [len(part) for part in states]))
