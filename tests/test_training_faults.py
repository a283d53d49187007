"""Planted faults that would make a useless drafter without a word: each stops the training with its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie.config import ConfigError
from eyrie.errors import BuildError
from eyrie.gates import GateError
from eyrie.records import RecordError, read_json, read_jsonl, write_json, write_jsonl
from eyrie.store import States, StateStore, StoreError
from tiny_eagle3 import LAYER_IDS, VOCABULARY, TinyBuild, make_tiny_build
from training_runs import run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    return make_tiny_build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def build(original: TinyBuild, tmp_path: Path) -> TinyBuild:
    return original.copied(tmp_path / "build", epochs=1)


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    data = read_json(path)
    change(data)
    write_json(path, data)


def recaptured(build: TinyBuild, change: Callable[[list[States]], list[States]]) -> None:
    """States changed as a wrong capture would: the store and the manifest agree about them."""
    manifest = build.folder / "manifest.json"
    target = read_json(build.folder / "target.json")
    recipe = {
        "target_revision": target["revision"],
        "layer_ids": LAYER_IDS,
        "dtype": "bfloat16",
        "compute_dtype": "float32",
    }
    states = StateStore(build.store, recipe)
    keys = [sample["key"] for sample in read_json(manifest)["samples"]]
    refs = states.find(keys)
    changed = change(list(states.load([refs[key] for key in keys])))
    shutil.rmtree(states.folder)
    states = StateStore(build.store, recipe)
    with states.writer("chat") as writer:
        made = writer.add(changed)
    digests = {key: ref.sha256 for key, ref in zip(keys, made, strict=True)}
    # A wrong capture files its states under the keys of the rows it was asked for.
    (index,) = states.folder.glob("index-*.jsonl")
    rows = [{**row, "key": key} for key, row in zip(keys, read_jsonl(index), strict=True)]
    write_jsonl(index, rows)

    def vouch(data: Any) -> None:
        for sample in data["samples"]:
            sample["sha256"] = digests[sample["key"]]

    change_json(manifest, vouch)


def mask_of_zeros(build: TinyBuild) -> None:
    path = build.folder / "tokenized_data.jsonl"
    write_jsonl(path, [{**row, "loss_mask": [0] * len(row["loss_mask"])} for row in read_jsonl(path)])


def one_layer_in_the_manifest(build: TinyBuild) -> None:
    """States of one layer, 7168 for a drafter of 21504 in the large."""
    change_json(build.folder / "manifest.json", lambda data: data.update(width=data["hidden_size"]))


def one_layer_in_the_shards(build: TinyBuild) -> None:
    width = read_json(build.folder / "target.json")["hidden_size"]
    recaptured(
        build,
        lambda every: [States(one.token_ids, one.aux[:, :width].contiguous(), one.last) for one in every],
    )


def rotated_rows(build: TinyBuild) -> None:
    """The states of row i under the key of row i + 1."""
    recaptured(build, lambda every: [every[-1], *every[:-1]])


def rotated_states(build: TinyBuild) -> None:
    """The same, with the right tokens beside the wrong states of as many tokens, in the store alone."""
    (folder,) = build.store.glob("hidden_states/*")
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in ("aux_hidden_states", "last_hidden_state"):
            tensors[name] = tensors[name].roll(1, 0)
        save_file(tensors, path)


def token_beyond_the_vocabulary(build: TinyBuild) -> None:
    path = build.folder / "tokenized_data.jsonl"
    rows = list(read_jsonl(path))
    train = next(row for row in rows if row["split"] == "train")
    train["input_ids"][3] = VOCABULARY
    write_jsonl(path, rows)


def draft_token_beyond_the_vocabulary(build: TinyBuild) -> None:
    def change(data: Any) -> None:
        data["token_ids"][-1] = VOCABULARY

    change_json(build.folder / "vocabulary.json", change)


@dataclass(frozen=True)
class Fault:
    plant: Callable[[TinyBuild], None]
    error: type[BuildError]
    words: str


@pytest.mark.parametrize(
    "fault",
    [
        Fault(mask_of_zeros, GateError, "none of the 30 training rows has a supervised token"),
        Fault(one_layer_in_the_manifest, GateError, r"states of 32 numbers for layers .*; expected 96"),
        Fault(
            one_layer_in_the_shards, StoreError, r"are 32 numbers wide .*; expected 96, the 3 captured layers"
        ),
        Fault(rotated_rows, StoreError, "the hidden states of row .* were captured from other tokens"),
        Fault(rotated_states, StoreError, "the hidden states of row .* have digest .*; the manifest says"),
        Fault(token_beyond_the_vocabulary, RecordError, "token ids from .* to 96; expected ids from 0 to 95"),
        Fault(draft_token_beyond_the_vocabulary, RecordError, "expected token_ids to be rising, .* below 96"),
    ],
    ids=lambda fault: fault.plant.__name__,
)
def test_a_fault_is_named(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault
) -> None:
    fault.plant(build)
    with pytest.raises(fault.error, match=fault.words):
        run(monkeypatch, build.arguments(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert not list(build.store.glob("drafters/*/state.safetensors")), "something was learnt from it"


def warm(build: TinyBuild, folder: Path, out: Path) -> list[str]:
    return [*build.arguments(out), "--warm-start", str(folder)]


@pytest.fixture
def earlier(build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The checkpoint of an earlier training."""
    run(monkeypatch, build.arguments(tmp_path / "earlier"))
    return tmp_path / "earlier"


def test_a_warm_start_begins_where_the_checkpoint_ends(
    build: TinyBuild, earlier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build.recipe["training"] |= {"learning_rate": 1e-9, "initialise": "least_squares"}
    run(monkeypatch, warm(build, earlier, tmp_path / "out"))
    before, after = (load_file(folder / "model.safetensors") for folder in (earlier, tmp_path / "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    parents = read_json(tmp_path / "out" / "training.json")["parents"]
    assert {Path(path).name for path in parents} >= {"model.safetensors", "config.json"}
    # Other weights to start from are another run.
    tensors = load_file(earlier / "model.safetensors")
    tensors["fc.weight"] += 1
    save_file(tensors, earlier / "model.safetensors")
    run(monkeypatch, warm(build, earlier, tmp_path / "other"))
    assert len(list(build.store.glob("drafters/*"))) == 3


def test_a_warm_start_refuses_another_vocabulary(
    build: TinyBuild, earlier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def change(data: Any) -> None:
        unused = sorted(set(range(VOCABULARY)) - set(data["token_ids"]))
        data["token_ids"] = sorted([*data["token_ids"][2:], *unused[:2]])

    change_json(build.folder / "vocabulary.json", change)
    with pytest.raises(
        ConfigError, match=r"(?s)another draft vocabulary: 2 of this build's 48.*drafter.vocab"
    ) as found:
        run(monkeypatch, warm(build, earlier, tmp_path / "out"))
    assert str(earlier) in str(found.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 64}, "intermediate_size: 48 there, 64 here"),
        ({"rope_theta": 5e5}, r"rope_theta: 10000.0 there, 500000.0 here"),
        ({"num_attention_heads": 2}, "num_attention_heads: 4 there, 2 here"),
    ],
)
def test_a_warm_start_refuses_another_shape(
    build: TinyBuild,
    earlier: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: dict[str, Any],
    words: str,
) -> None:
    build.recipe["drafter"] |= change
    with pytest.raises(ConfigError, match=words):
        run(monkeypatch, warm(build, earlier, tmp_path / "out"))


def test_a_warm_start_refuses_other_layers(
    build: TinyBuild, earlier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads((earlier / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    (earlier / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"layer_ids: \(1, 2, 4\) there, \(1, 2, 3\) here"):
        run(monkeypatch, warm(build, earlier, tmp_path / "out"))
