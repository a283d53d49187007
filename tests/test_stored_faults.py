"""Damage that befalls stored states stops the training, with the shard's name and the row's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import train_drafter
from eyrie.eagle3.samples import read_captures
from eyrie.records import read_json, write_json
from eyrie.store import StateRef, StateStore, StoreError
from tiny_eagle3 import TinyBuild, make_tiny_build, tiny_recipe


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    return make_tiny_build(tmp_path_factory.mktemp("tiny"), rows=25)


@pytest.fixture
def build(original: TinyBuild, tmp_path: Path) -> TinyBuild:
    shutil.copytree(original.folder, tmp_path / "build")
    return TinyBuild(tmp_path / "build", tiny_recipe())


# The first rows are held out, and training does not look at them; this one trains.
TRAINS = 10


def place(build: TinyBuild, number: int = TRAINS) -> tuple[StateStore, StateRef, dict[str, Any]]:
    """Where a row's states lie, and what the manifest says of them."""
    manifest = build.folder / "manifest.json"
    store = StateStore(build.store, read_captures([manifest], read_json(build.folder / "target.json")).recipe)
    entry = read_json(manifest)["samples"][number]
    return store, store.find([entry["key"]])[entry["key"]], entry


def truncate(build: TinyBuild) -> str:
    store, ref, _ = place(build)
    shard = store.folder / ref.shard
    shard.write_bytes(shard.read_bytes()[:-1000])
    return rf"{ref.shard}: sample \w+ cannot be read"


def flip_a_bit(build: TinyBuild) -> str:
    store, ref, entry = place(build)
    shard = store.folder / ref.shard
    data = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    layers = json.loads(data[8:start])["aux_hidden_states"]
    data[start + layers["data_offsets"][0] + 2 * ref.start * layers["shape"][1] + 6] ^= 1
    shard.write_bytes(data)
    return rf"{ref.shard}.* row {entry['id']} of .* digest"


def store_what_is_no_number(build: TinyBuild) -> str:
    """A shard and a manifest that agree with one another, on states that no check at the capture saw."""
    store, place_of, entry = place(build)
    (states,) = store.load([place_of])
    aux = states.aux.clone()
    aux[4, 7] = torch.nan
    with store.writer("a-first") as writer:
        (ref,) = writer.add([replace(states, aux=aux, stored_sha256=None)])
    document = read_json(build.folder / "manifest.json")
    document["samples"][TRAINS]["sha256"] = ref.sha256
    write_json(build.folder / "manifest.json", document)
    return rf"{ref.shard}.* row {entry['id']} of .*not finite"


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, store_what_is_no_number])
def test_it_stops_the_training(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Callable[[TinyBuild], str]
) -> None:
    words = damage(build)
    monkeypatch.setattr(sys, "argv", ["train_drafter.py", *build.arguments(tmp_path / "out")])
    with pytest.raises(StoreError) as told:
        train_drafter.main()
    assert re.search(words, str(told.value)), str(told.value)
    assert re.search(r"row row-\d+ of dataset chat", str(told.value))
    assert "verify_store.py" in str(told.value)
    assert not (tmp_path / "out").exists()
