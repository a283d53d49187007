"""Steps in parts and by several processes, streaming, prefetching: the same drafter whatever is at once."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyrie.console import start_log
from eyrie.eagle3 import samples as samples_module
from eyrie.eagle3.lessons import micro_batches, shares
from eyrie.eagle3.prefetch import prefetched
from eyrie.eagle3.processes import ALONE
from eyrie.eagle3.samples import CheckedStates, StoredSamples, find_choices, read_captures, read_rows
from eyrie.encoding import States
from eyrie.records import read_json, read_jsonl
from eyrie.store import StateStore
from eyrie.target_weights import TargetWeights
from tiny_eagle3 import TinyBuild, make_tiny_build
from training_runs import farthest, files, forked, run, settings, trained

SETTINGS = {"epochs": 2, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    return make_tiny_build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def build(original: TinyBuild, tmp_path: Path) -> TinyBuild:
    return original.copied(tmp_path / "build", **SETTINGS)


@pytest.mark.parametrize("normalisation", ["supervised", "positions"])
def test_parts_add_up_to_the_whole_step(
    original: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, normalisation: str
) -> None:
    """Samples alone, a few together, and the whole step: the same weights but for the sums' last digits."""
    weights = {}
    for limit in (None, 45, 1):
        build = original.copied(tmp_path / str(limit), **SETTINGS)
        settings(build, micro_batch_tokens=limit, loss_normalisation=normalisation)
        run(monkeypatch, build.arguments(tmp_path / f"out-{limit}"))
        weights[limit] = trained(build)
    assert 0 < farthest(weights[None], weights[1]) < 1e-6
    assert farthest(weights[None], weights[45]) < 1e-6


def test_two_processes_train_what_one_does(
    original: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone, together = (original.copied(tmp_path / name, **SETTINGS) for name in ("alone", "together"))
    settings(alone, micro_batch_tokens=20, initialise="least_squares")
    settings(together, initialise="least_squares")
    log = tmp_path / "training.jsonl"
    ends = forked([*together.arguments(tmp_path / "out"), "--training-log", str(log)], 2, tmp_path)
    assert [status for status, _ in ends] == [0, 0], ends
    run(monkeypatch, alone.arguments(tmp_path / "alone-out"))
    assert farthest(trained(alone), trained(together)) < 1e-6
    assert read_json(tmp_path / "out" / "training.json")["processes"] == [2]
    steps = [line["step"] for line in read_jsonl(log) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))


def test_all_processes_fail_when_one_does(build: TinyBuild, tmp_path: Path) -> None:
    """One of two finds a sample whose states are not what the manifest says; the other does not wait."""
    manifest = build.folder / "manifest.json"
    data = json.loads(manifest.read_text())
    rows = {row["id"]: row for row in read_jsonl(build.folder / "tokenized_data.jsonl")}
    first = next(sample for sample in data["samples"] if rows[sample["id"]]["split"] == "train")
    first["sha256"] = "0" * 64
    manifest.write_text(json.dumps(data))
    ends = forked(build.arguments(tmp_path / "out"), 2, tmp_path)
    assert [status for status, _ in ends] == [1, 1]
    said = [text for _, text in ends]
    assert any("have digest" in text and "the manifest says 0000" in text for text in said)
    assert any("another process of this training is gone" in text for text in said)
    assert not (tmp_path / "out").exists()


@given(
    places=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    count=st.integers(1, 5),
    limit=st.one_of(st.none(), st.integers(1, 80)),
)
def test_every_sample_of_a_step_is_in_one_part_of_one_process(
    places: list[int], count: int, limit: int | None
) -> None:
    indices = list(range(len(places)))
    dealt = shares(indices, places, count)
    assert len(dealt) == count and [index for share in dealt for index in share] == indices
    largest = max(places)
    assert all(sum(places[i] for i in share) <= sum(places) / count + largest for share in dealt)
    for share in dealt:
        parts = micro_batches(share, places, limit)
        assert [index for part in parts for index in part] == share
        assert all(parts)
        for part in parts:
            assert limit is None or len(part) == 1 or sum(places[i] for i in part) <= limit


def stored(build: TinyBuild, kept_bytes: int) -> tuple[StoredSamples, CheckedStates]:
    target = read_json(build.folder / "target.json")
    captures = read_captures([build.folder / "manifest.json"], target)
    states = StateStore(build.folder / "store", captures.recipe)
    rows = read_rows([build.folder / "tokenized_data.jsonl"], states, captures)
    checked = CheckedStates(rows, states, captures, kept_bytes)
    head = TargetWeights(build.folder / "target", target["files"]).head(True)
    choices = find_choices(rows, checked, head, "legacy", ALONE, start_log("test", None))
    return StoredSamples(rows, choices, checked, "legacy"), checked


def all_states() -> list[States]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is States]


def test_no_more_states_are_kept_than_there_is_room_for(build: TinyBuild) -> None:
    """However many samples are read, those that stay take no more than the bound."""
    one = sum(t.nbytes for t in (stored(build, 0)[0][0].aux, stored(build, 0)[0][0].last))
    # Those of other tests are none of this one's.
    before = all_states()
    samples, _ = stored(build, 3 * one)
    for _ in range(2):
        for index in range(len(samples)):
            samples.load([index])
    alive = [states for states in all_states() if all(states is not other for other in before)]
    held = sum(states.aux.nbytes + states.last.nbytes for states in alive if states.last is not None)
    assert 0 < held <= 3 * one
    # Kept or read again, in any order and together: the same.
    every = stored(build, 1 << 30)[0].load(range(len(samples)))
    for index in (0, 7, 3, len(samples) - 1):
        assert torch.equal(samples[index].aux, every[index].aux)
        assert torch.equal(samples[index].choices, every[index].choices)


def test_what_is_kept_changes_nothing(
    original: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = []
    for kept in (0, 1 << 30):
        build = original.copied(tmp_path / str(kept), **SETTINGS)
        with monkeypatch.context() as patch:
            patch.setattr(samples_module.CheckedStates.__init__, "__defaults__", (kept,))
            run(patch, build.arguments(tmp_path / f"out-{kept}"))
        results.append(files(tmp_path / f"out-{kept}")["model.safetensors"])
    assert results[0] == results[1]


def test_choices_are_the_same_however_the_states_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(start, start + n)[:, None] for start, n in ((0, 3), (3, 0), (3, 9), (12, 4))]
    for rows in (1, 3, 4, 5, 16, 50):
        chunks = list(samples_module._chunks(tensors, rows))
        assert torch.cat(chunks).flatten().tolist() == list(range(16))
        assert [len(chunk) for chunk in chunks[:-1]] == [rows] * (len(chunks) - 1)
        assert 0 < len(chunks[-1]) <= rows


def test_a_thread_works_ahead_but_not_far() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with prefetched(numbers()) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        time.sleep(0.05)
        assert 3 <= len(made) <= 7
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_an_error_of_the_thread_comes_where_its_item_would() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("the second one")

    with prefetched(broken()) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="the second one"):
            next(items)
