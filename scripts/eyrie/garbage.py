"""What lies in the store and no result needs: shards, answers, drafters that no file under work/ names.

Named is what a manifest, ledger or training.json names. What is not named but belongs to a configured dataset
or to a training that hasn't ended is unfinished: the next run goes on from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eyrie.config import Config, SamplingSettings
from eyrie.journals import answers_key, journal_rows, rewrite_journal, writers_shut_out
from eyrie.recipes import ANSWERING_VERSION, answers_recipe
from eyrie.records import RecordError, read_json, sha256_file
from eyrie.settings import parse
from eyrie.states import states_recipe

_INDEXES = "index-*.jsonl"


@dataclass(frozen=True)
class Item:
    """A file or folder that no result names; `unfinished` says what would go on from it, if anything."""

    path: Path
    size: int
    why: str
    unfinished: str | None = None


class Garbage:
    """What the store below a work folder holds beyond what is named there.

    configs: the builds whose unfinished work is to be told apart. Raises RecordError for a manifest or ledger
    that can't be read: what it names is not known then.
    """

    def __init__(self, work: Path, configs: Sequence[Config]) -> None:
        self._work = work
        self._store = work / "store"
        self._configs = configs
        self._targets = {path.parent.name: read_json(path) for path in sorted(work.glob("*/target.json"))}

    def items(self) -> list[Item]:
        """All of it, shards first."""
        return [*self._shards(), *self._answers(), *self._drafters(), *self._leftovers()]

    def delete(self, items: Iterable[Item]) -> None:
        """Delete the items, and index rows that name them. Raises StoreError where a writer is at work."""
        doomed = {item.path for item in items}
        for folder in sorted(self._store.glob("hidden_states/*/")):
            shards = {path for path in doomed if path.parent == folder}
            if not shards:
                continue
            journals = sorted(folder.glob(_INDEXES))
            with writers_shut_out(journals):
                for path in shards:
                    path.unlink()
                gone = {path.name for path in shards}
                for journal in journals:
                    rewrite_journal(journal, partial(_leads_elsewhere, gone))
            doomed -= shards
        for path in sorted(doomed):
            if path.is_dir():
                with writers_shut_out(sorted(path.glob("*.jsonl"))):
                    shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def journals(self) -> list[Path]:
        """Every journal that a build may be writing."""
        return sorted(
            [*self._store.glob("hidden_states/*/index-*.jsonl"), *self._store.glob("answers/*/*.jsonl")]
        )

    def _shards(self) -> Iterator[Item]:
        """Shards of which no manifest names a sample; one that is partly named stays."""
        named = {
            sample["key"]
            for path in self._work.glob("*/hidden_states/*/manifest.json")
            for sample in _document(path)["samples"]
        }
        for folder in sorted(self._store.glob("hidden_states/*/")):
            keys: dict[str, set[str]] = {}
            datasets: dict[str, set[str]] = {}
            for journal in sorted(folder.glob(_INDEXES)):
                for _, row in journal_rows(journal):
                    if row is not None and "shard" in row:
                        keys.setdefault(row["shard"], set()).add(row["key"])
                        datasets.setdefault(row["shard"], set()).add(journal.stem.removeprefix("index-"))
            going_on = self._unfinished_states(folder)
            stranger = self._stranger(folder)
            for path in sorted(folder.glob("*.safetensors")):
                if keys.get(path.name, set()) & named:
                    continue
                if path.name not in keys:
                    yield Item(path, path.stat().st_size, "no index names it")
                    continue
                waiting = ", ".join(sorted(datasets[path.name] & going_on))
                unfinished = f"states for {waiting}, not captured yet" if waiting else stranger
                why = "no manifest names a sample of it"
                yield Item(path, path.stat().st_size, why, unfinished)

    def _unfinished_states(self, folder: Path) -> set[str]:
        """The configured datasets whose capture would still take states of this folder's recipe."""
        recipe = _document(folder / "recipe.json")
        return {
            dataset
            for config in self._configs
            if self._is_recipe_of(recipe, config)
            for dataset in config.datasets
            if not self._is_captured(config, dataset)
        }

    def _is_recipe_of(self, recipe: Mapping[str, Any], config: Config) -> bool:
        target = self._targets.get(config.target.name)
        if target is None:
            return True  # What it would be can't be told, so it may be this.
        wanted = states_recipe(target, config.hidden_states, config.target.dtype)
        # With top tokens or the last state: either may be made into what is wanted.
        return all(recipe[name] == value for name, value in wanted.items())

    def _stranger(self, folder: Path) -> str | None:
        """Why nobody here can tell whether a recipe's work will be gone on with; None where it won't."""
        revision = _document(folder / "recipe.json")["target_revision"]
        known = {config.target.name for config in self._configs}
        for name in sorted(known - self._targets.keys()):
            return f"may be of target {name}, which has no target.json yet"
        for name, target in self._targets.items():
            if target["revision"] == revision and name not in known:
                return f"of target {name}, whose configuration was not given (--config)"
        return None

    def _is_captured(self, config: Config, dataset: str) -> bool:
        """Whether there is a manifest of the rows that are there."""
        build = self._work / config.target.name
        manifest = build / "hidden_states" / dataset / "manifest.json"
        rows = build / "tokenized" / dataset / "tokenized_data.jsonl"
        if not manifest.exists() or not rows.exists():
            return False
        parents = _document(manifest)["parents"]
        return sha256_file(rows) in parents.values()

    def _answers(self) -> Iterator[Item]:
        """Folders of answers under a recipe that no ledger was made with."""
        named = {
            answers_key(
                answers_recipe(target, recipe["version"], parse(SamplingSettings, recipe["sampling"]))
            )
            for name, target in self._targets.items()
            for path in self._work.glob(f"{name}/tokenized/*/ledger.json")
            if "sampling" in (recipe := _document(path)["recipe"])
        }
        going_on = self._configured_answers()
        for folder in sorted(self._store.glob("answers/*/")):
            if folder.name in named:
                continue
            unfinished = going_on.get(folder.name) or self._stranger(folder)
            yield Item(folder, _size(folder), "no ledger was made with these answers", unfinished)

    def _configured_answers(self) -> dict[str, str]:
        """The folders that the configured prompts are answered into, and whose they are."""
        found: dict[str, list[str]] = {}
        for config in self._configs:
            target = self._targets.get(config.target.name)
            for name, dataset in config.datasets.items() if target else ():
                sampling = config.partitions[dataset.partition]
                if dataset.kind == "prompts" and target:
                    key = answers_key(answers_recipe(target, ANSWERING_VERSION, sampling))
                    found.setdefault(key, []).append(name)
        return {key: f"answers for {', '.join(sorted({*names}))}" for key, names in found.items()}

    def _drafters(self) -> Iterator[Item]:
        """Trainings that no checkpoint came from."""
        named = {
            _document(path)["key"]
            for folder in ("drafter", "scaling/*")
            for path in self._work.glob(f"*/{folder}/checkpoint/training.json")
        }
        for folder in sorted(self._store.glob("drafters/*/")):
            if folder.name not in named:
                unfinished = None if _is_finished(folder) else "a training that has not ended"
                for config in self._configs:
                    if not (self._work / config.target.name / "drafter/checkpoint/training.json").exists():
                        unfinished = (
                            unfinished or f"{config.target.name} has no checkpoint yet: it may be its"
                        )
                yield Item(folder, _size(folder), "no checkpoint came from it", unfinished)

    def _leftovers(self) -> Iterator[Item]:
        """What verify_store.py set aside, and files that a kill left half written."""
        aside = self._store / "damaged"
        if aside.exists():
            yield Item(aside, _size(aside), "set aside as damaged")
        for path in sorted(self._store.rglob(".*.tmp")):
            if aside not in path.parents:
                yield Item(path, path.stat().st_size, "half written when a job was killed")


def _leads_elsewhere(gone: set[str], row: Mapping[str, Any]) -> bool:
    return row.get("shard") not in gone


def _document(path: Path) -> dict[str, Any]:
    document = read_json(path)
    if not isinstance(document, dict):
        raise RecordError(
            f"{path}: expected a JSON object; what it names is not known, so nothing is deleted"
        )
    return document


def _is_finished(folder: Path) -> bool:
    """Whether a training ended; one whose state can't be read has not, as far as anybody knows."""
    try:
        with safe_open(folder / "state.safetensors", framework="numpy") as handle:
            return bool(json.loads(handle.metadata()["run"])["finished"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError):
        return False


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
