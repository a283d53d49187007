"""What no result needs is listed, and deleted only when told; what the next run goes on from is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gc_store
from eyrie.config import Config, parse_config
from eyrie.encoding import States
from eyrie.errors import BuildError
from eyrie.garbage import Garbage
from eyrie.journals import Journal, StoreError, answers_folder
from eyrie.recipes import answering_recipe, answers_recipe
from eyrie.records import sha256_file, write_json
from eyrie.states import states_recipe
from eyrie.store import StateRef, StateStore

TARGET = {
    "revision": "r",
    "template_sha256": "t",
    "layers": 8,
    "hidden_size": 4,
}


def configured(name: str = "tiny") -> Config:
    source = {"files": ["a.jsonl"], "format": "jsonl"}
    chat = {"source": source, "licence": "MIT", "layout": "messages", "kind": "prompts", "partition": "short"}
    return parse_config(
        {
            "target": {"name": name, "path": "models/tiny"},
            "partitions": {"short": {"max_new_tokens": 4}},
            "datasets": {"chat": chat, "code": chat},
        }
    )


class Work:
    """A work folder with a store, made by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        write_json(folder / "tiny/target.json", TARGET)

    def shard(self, dataset: str, *samples: int, **changes: Any) -> Path:
        """A shard with these samples, each of two tokens."""
        recipe = states_recipe(TARGET, configured().hidden_states, "float32") | changes
        states = StateStore(self.store, recipe)
        with states.writer(dataset) as writer:
            refs = writer.add([States([one, 1], torch.ones(2, 12), torch.ones(2, 4)) for one in samples])
        self.refs = {**getattr(self, "refs", {}), **dict(zip(samples, refs, strict=True))}
        return states.folder / refs[0].shard

    def manifest(self, dataset: str, *samples: int) -> None:
        rows = self.folder / "tiny/tokenized" / dataset / "tokenized_data.jsonl"
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text(dataset)
        refs: list[StateRef] = [self.refs[one] for one in samples]
        document = {"parents": {str(rows): sha256_file(rows)}, "samples": [{"key": ref.key} for ref in refs]}
        write_json(self.folder / "tiny/hidden_states" / dataset / "manifest.json", document)

    def answers(self, temperature: float) -> Path:
        sampling = configured().partitions["short"].model_copy(update={"temperature": temperature})
        folder = answers_folder(self.store, answers_recipe(TARGET, 1, sampling))
        with Journal(folder / "chat.jsonl") as journal:
            journal.append([{"key": "k"}])
        return folder

    def drafter(self, key: str, finished: bool) -> Path:
        path = self.store / "drafters" / key / "state.safetensors"
        path.parent.mkdir(parents=True)
        save_file({"w": torch.ones(2)}, path, metadata={"run": json.dumps({"finished": finished})})
        return path.parent

    def checkpoint(self, key: str) -> None:
        write_json(self.folder / "tiny/drafter/checkpoint/training.json", {"key": key})

    def listed(self, *configs: Config) -> dict[Path, str | None]:
        """Path and why it is kept all the same, of each item."""
        items = Garbage(self.folder, configs or [configured()]).items()
        return {item.path: item.unfinished for item in items}


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "work")


def test_shards_that_no_manifest_names_are_listed_and_partly_named_ones_stay(work: Work) -> None:
    named, partly, unnamed = work.shard("chat", 1, 2), work.shard("chat", 3, 4), work.shard("code", 5)
    work.manifest("chat", 1, 2, 4)
    work.manifest("code")
    assert work.listed() == {unnamed: None}
    garbage = Garbage(work.folder, [configured()])
    garbage.delete(garbage.items())
    assert named.exists() and partly.exists() and not unnamed.exists()
    rows = [path.read_text() for path in sorted(unnamed.parent.glob("index-*.jsonl"))]
    assert unnamed.name not in "".join(rows) and named.name in "".join(rows)
    assert work.listed() == {}


def test_states_of_a_dataset_that_has_no_manifest_yet_are_kept(work: Work) -> None:
    waiting, other_way = work.shard("chat", 1), work.shard("chat", 1, dtype="float16")
    assert {path: bool(why) for path, why in work.listed().items()} == {waiting: True, other_way: False}
    work.manifest("chat")
    assert work.listed() == {waiting: None, other_way: None}
    # More was answered since the manifest was made, and not captured yet.
    (work.folder / "tiny/tokenized/chat/tokenized_data.jsonl").write_text("more")
    assert "chat" in (work.listed()[waiting] or "")


def test_answers_are_kept_by_their_ledger_or_their_configuration(work: Work) -> None:
    now, before = work.answers(0.0), work.answers(0.5)
    assert {path: bool(why) for path, why in work.listed().items()} == {now: True, before: False}
    ledger = {"recipe": json.loads(answering_recipe(configured(), "chat"))}
    write_json(work.folder / "tiny/tokenized/chat/ledger.json", ledger)
    assert work.listed() == {before: None}


def test_what_belongs_to_a_target_that_nobody_told_of_is_kept(work: Work) -> None:
    answers, states = work.answers(0.5), work.shard("chat", 1, dtype="float16")
    assert work.listed() == {states: None, answers: None}
    for name in ("another", "tiny2"):
        told = work.listed(configured(name))
        assert len(told) == 2 and all(told.values()) and name in (told[answers] or "")
    write_json(work.folder / "another/target.json", {**TARGET, "revision": "s"})
    told = work.listed(configured("another"))
    assert all(why and "tiny" in why for why in told.values()) and len(told) == 2


def test_drafters_are_kept_by_a_checkpoint_or_until_they_end(work: Work) -> None:
    named, ended, going = (work.drafter(key, key != "going") for key in ("named", "ended", "going"))
    assert all(work.listed().values()), "no checkpoint yet: it may come from any of them"
    work.checkpoint("named")
    assert {path: bool(why) for path, why in work.listed().items()} == {ended: False, going: True}
    assert named not in work.listed()


def test_drafters_of_shares_are_kept_by_their_checkpoints(work: Work) -> None:
    work.checkpoint("whole")
    folders = [work.drafter(key, True) for key in ("whole", "eighth", "other")]
    write_json(work.folder / "tiny/scaling/1-8/checkpoint/training.json", {"key": "eighth"})
    assert list(work.listed()) == folders[2:]


def test_leftovers_are_listed(work: Work) -> None:
    shard = work.shard("chat", 1)
    work.manifest("chat", 1)
    half = shard.with_name(f".{shard.name}.x.tmp")
    half.write_bytes(b"half")
    aside = work.store / "damaged"
    aside.mkdir()
    assert work.listed() == {aside: None, half: None}


def command(work: Work, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    config = work.folder.parent / "config.yaml"
    write_json(config, configured().model_dump(mode="json"))
    monkeypatch.chdir(work.folder.parent)
    monkeypatch.setattr(sys, "argv", ["gc_store", *arguments])
    gc_store.main()


def test_nothing_is_deleted_unless_told(
    work: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting, unnamed = work.shard("chat", 1), work.shard("code", 5)
    work.manifest("code")
    command(work, monkeypatch)
    said = capsys.readouterr().out
    assert f"{unnamed.relative_to(work.folder.parent)}: no manifest names" in said
    assert "kept unless --unfinished: 1" in said and "states for chat" in said
    assert waiting.exists() and unnamed.exists()
    command(work, monkeypatch, "--delete")
    assert waiting.exists() and not unnamed.exists()
    command(work, monkeypatch, "--delete", "--unfinished")
    assert not waiting.exists()


def test_a_running_build_is_not_disturbed(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = work.answers(0.5)
    with Journal(answers / "chat.jsonl"), pytest.raises(StoreError, match="written by another process"):
        command(work, monkeypatch, "--delete")
    lock = work.folder.parent / ".snakemake/locks/0.input.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    with pytest.raises(BuildError, match="make unlock"):
        command(work, monkeypatch, "--delete")
    assert (answers / "chat.jsonl").exists()
