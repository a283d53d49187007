"""Damage to the store is named, set aside, and mended by the next run, which makes nothing else anew."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import verify_store
from eyrie.console import start_log
from eyrie.encoding import States
from eyrie.journals import Journal, StoreError
from eyrie.records import read_json, write_json, write_jsonl
from eyrie.store import StateStore
from eyrie.store_check import Fault, StoreCheck
from tiny_target import DATASET, ENGINE, STATES, Stages

ROWS = 6
MANIFEST = Path("work/tiny/hidden_states") / DATASET / "manifest.json"
STORE = Path("work/store")


def capture(stages: Stages) -> None:
    recipe = {"version": 1, "dtype": "float32", "hidden_states": STATES}
    stages.run(
        "capture_states",
        *("--dataset", DATASET, "--tokenized", "tokenized_data.jsonl", "--target", "target.json"),
        *("--target-path", "target", "--recipe", json.dumps(recipe), "--engine", json.dumps(ENGINE)),
        *("--store", str(STORE), "--out", str(MANIFEST)),
    )


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the states of a few rows, two to a shard, which no test changes."""
    with pytest.MonkeyPatch.context() as patch:
        stages = Stages(tmp_path_factory.mktemp("captured"), patch)
        rows = [
            {
                "id": f"row-{number}",
                "input_ids": [5 + number, *range(3, 7 + number)],
                "loss_mask": [0, *[1] * (4 + number)],
                "greedy": False,
            }
            for number in range(ROWS)
        ]
        write_jsonl(stages.folder / "tokenized_data.jsonl", rows)
        capture(stages)
    return stages.folder


@pytest.fixture
def stages(captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    shutil.copytree(captured, tmp_path / "copy", symlinks=True)
    return Stages(tmp_path / "copy", monkeypatch)


def checked(stages: Stages) -> StoreCheck:
    check = StoreCheck(stages.folder / "work", start_log("test", None))
    check.run()
    return check


def verify(stages: Stages, *arguments: str) -> int:
    """The command's status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(stages.folder)
        patch.setattr(sys, "argv", ["verify_store", "--work", "work", *arguments])
        try:
            verify_store.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def shards(stages: Stages) -> list[Path]:
    return sorted((stages.folder / STORE).glob("hidden_states/*/*.safetensors"))


def index(stages: Stages) -> Path:
    return next((stages.folder / STORE).glob("hidden_states/*/index-*.jsonl"))


def index_rows(stages: Stages) -> list[dict[str, Any]]:
    return [json.loads(line) for line in index(stages).read_bytes().splitlines()]


def files(stages: Stages) -> dict[str, bytes]:
    work = stages.folder / "work"
    return {str(path): path.read_bytes() for path in sorted(work.rglob("*")) if path.is_file()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_a_sound_store_is_said_to_be_one(stages: Stages) -> None:
    before = files(stages)
    assert verify(stages) == 0
    assert files(stages) == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "are not those that were stored"),
        (truncate, "cannot be read as a shard"),
        (empty, "cannot be read as a shard"),
        (Path.unlink, "is not there"),
    ],
)
def test_a_damaged_shard_is_named_and_its_samples_alone_are_captured_again(
    stages: Stages, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], words: str
) -> None:
    manifest = (stages.folder / MANIFEST).read_bytes()
    others = {path: path.stat().st_mtime_ns for path in shards(stages)}
    shard = shards(stages)[1]
    damage(shard)
    del others[shard]
    lost = [row["key"] for row in index_rows(stages) if row["shard"] == shard.name]
    before = files(stages)

    assert verify(stages, "--dry-run") == 1
    assert files(stages) == before
    (line,) = capsys.readouterr().out.splitlines()
    assert words in line and shard.name in line
    named = [key for key in lost if f"sample {key} (row row-" in line]
    assert named and f"of dataset {DATASET}" in line

    assert verify(stages) == 1
    aside = stages.folder / STORE / "damaged/hidden_states" / shard.parent.name / shard.name
    assert aside.exists() == (damage is not Path.unlink)
    assert not (stages.folder / MANIFEST).exists()
    assert verify(stages) == 0

    capture(stages)
    assert [row["key"] for row in index_rows(stages)[-len(lost) :]] == lost
    assert len(index_rows(stages)) == ROWS
    assert {path: path.stat().st_mtime_ns for path in shards(stages) if path != shard} == others
    assert (stages.folder / MANIFEST).read_bytes() == manifest
    assert verify(stages) == 0


def test_every_byte_of_a_shard_is_looked_at(stages: Stages) -> None:
    shard = shards(stages)[0]
    data = shard.read_bytes()
    for place in (*range(0, len(data), 97), len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 0x10
        shard.write_bytes(changed)
        assert checked(stages).faults, f"byte {place} of {len(data)}"


def test_numbers_that_are_none_are_found_though_they_are_what_was_stored(stages: Stages) -> None:
    store = StateStore(stages.folder / STORE, read_json(index(stages).parent / "recipe.json"))
    wrong = States([7, 8], torch.zeros(2, 9), torch.tensor([[0.0], [torch.nan]]))
    with store.writer("other") as writer:
        (ref,) = writer.add([wrong])
    (fault,) = checked(stages).faults
    assert fault == Fault(store.folder / ref.shard, "holds numbers that are not finite", (ref.key,))
    assert verify(stages) == 1 and verify(stages) == 0
    assert (stages.folder / MANIFEST).exists()


def test_damaged_index_lines_cost_their_samples(stages: Stages) -> None:
    manifest = (stages.folder / MANIFEST).read_bytes()
    lines = index(stages).read_bytes().splitlines(keepends=True)
    torn, key = lines[2][:40] + b"\n", json.loads(lines[2])["key"]
    index(stages).write_bytes(b"".join([*lines[:2], torn, *lines[3:]]))
    told = list(checked(stages).lines())
    assert f"{index(stages)}: line 3 is torn or damaged" in told[0]
    assert f"sample {key} (row row-" in told[1] and "manifest.json" in told[1]
    assert verify(stages) == 1 and verify(stages) == 0
    assert index(stages).read_bytes() == b"".join([*lines[:2], *lines[3:]])
    capture(stages)
    assert (stages.folder / MANIFEST).read_bytes() == manifest


@pytest.mark.parametrize("change", [{"start": 3}, {"tokens": 4}, {"sha256": "0" * 64}])
def test_an_index_that_lies_is_found(stages: Stages, change: dict[str, Any]) -> None:
    manifest = (stages.folder / MANIFEST).read_bytes()
    rows = index_rows(stages)
    rows[1] |= change
    write_jsonl(index(stages), rows)
    fault, *_ = checked(stages).faults
    assert fault.file == index(stages) and fault.keys == (rows[1]["key"],)
    assert verify(stages) == 1 and verify(stages) == 0
    assert len(shards(stages)) == ROWS // 2, "the shards are sound"
    capture(stages)
    assert (stages.folder / MANIFEST).read_bytes() == manifest


def test_a_manifest_that_vouches_for_something_else_is_found(stages: Stages) -> None:
    path = stages.folder / MANIFEST
    before, document = path.read_bytes(), read_json(path)
    document["samples"][3]["sha256"] = "0" * 64
    write_json(path, document)
    (line,) = checked(stages).lines()
    assert "manifest.json" in line and "(row row-3 of dataset" in line
    path.write_bytes(b"{")
    (fault,) = checked(stages).faults
    assert "is no manifest" in fault.problem
    assert verify(stages) == 1 and not path.exists()
    capture(stages)
    assert path.read_bytes() == before and len(index_rows(stages)) == ROWS


def test_answers_and_trainings_that_cannot_be_read_are_set_aside(stages: Stages) -> None:
    answers = stages.folder / STORE / "answers/recipe" / f"{DATASET}.jsonl"
    answers.parent.mkdir(parents=True)
    answers.write_bytes(b'{"key":"a"}\n{"key":"b"\n{"key":"c"}\n')
    state = stages.folder / STORE / "drafters/key/state.safetensors"
    state.parent.mkdir(parents=True)
    shutil.copy(shards(stages)[0], state)
    assert len(checked(stages).faults) == 1
    truncate(state)
    told = list(checked(stages).lines())
    assert "line 2 is torn" in told[0] and "state of a training" in told[1]
    assert verify(stages) == 1 and verify(stages) == 0
    assert answers.read_bytes() == b'{"key":"a"}\n{"key":"c"}\n'
    aside = stages.folder / STORE / "damaged"
    assert b'{"key":"b"' in (aside / "answers/recipe" / answers.name).read_bytes()
    assert (aside / "drafters/key/state.safetensors").exists()


def test_a_writer_at_work_is_left_alone(stages: Stages) -> None:
    with Journal(index(stages)):
        with index(stages).open("ab") as file:
            file.write(b'{"key":"half a ro')
        assert not checked(stages).faults
        shards(stages)[0].unlink()
        with pytest.raises(StoreError, match="written by another process"):
            verify(stages)
    assert verify(stages) == 1
