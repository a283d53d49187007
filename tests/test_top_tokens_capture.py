"""Capture with float8 and top tokens: what the answering pass left is converted without the target."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from capture_states import make_likeliest
from eyrie.config import HiddenStatesSettings
from eyrie.eagle3.samples import check_draft_vocabulary, read_captures
from eyrie.gates import GateError
from eyrie.records import read_json, write_json
from eyrie.states import states_recipe
from eyrie.store import StateStore
from tiny_target import DATASET, ENGINE, STATES, Stages, forbid_the_model, question

SETTINGS = {**STATES, "layer_ids": [1, 3, 5], "dtype": "float8", "top_tokens": 5}
QUESTIONS = 5


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    monkeypatch.setattr("tiny_target.STATES", SETTINGS)
    stages = Stages(tmp_path / "build", monkeypatch)
    stages.write_prompts(map(question, range(QUESTIONS)))
    stages.answer()
    write_vocabulary(stages, list(range(0, 400, 3)))
    return stages


def write_vocabulary(stages: Stages, ids: list[int]) -> None:
    vocab_size = read_json(stages.folder / "target.json")["vocab_size"]
    ids = [one for one in ids if one < vocab_size]
    write_json(stages.folder / "vocabulary.json", {"vocab_size": vocab_size, "token_ids": ids})


def capture(stages: Stages, *more: str) -> None:
    recipe = {"version": 1, "dtype": "float32", "hidden_states": SETTINGS}
    stages.run(
        "capture_states",
        *("--dataset", DATASET, "--tokenized", "tokenized_data.jsonl", "--target", "target.json"),
        *("--target-path", "target", "--recipe", json.dumps(recipe), "--engine", json.dumps(ENGINE)),
        *("--vocabulary", "vocabulary.json", "--store", "store", "--out", "manifest.json", *more),
    )


def stored(stages: Stages) -> list[Any]:
    target = read_json(stages.folder / "target.json")
    captures = read_captures([stages.folder / "manifest.json"], target)
    store = StateStore(stages.folder / "store", captures.recipe)
    refs = store.find(captures.digests)
    assert {key: ref.sha256 for key, ref in refs.items()} == captures.digests
    return [(refs[key], states) for key in sorted(refs) for states in store.load([refs[key]])]


def test_what_the_answers_left_is_converted_with_the_head_alone(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = read_json(stages.folder / "target.json")
    base = StateStore(
        stages.folder / "store", states_recipe(target, HiddenStatesSettings(**SETTINGS), "float32")
    )
    left = base.find(base.key(row["input_ids"]) for row in stages.samples())
    assert len(left) == QUESTIONS
    with monkeypatch.context() as patch:
        forbid_the_model(patch)
        capture(stages)
    likeliest, _ = make_likeliest(stages.folder / "vocabulary.json", 5, target, stages.folder / "target")
    assert likeliest is not None
    for _, states in stored(stages):
        (before,) = base.load([left[base.key(states.token_ids)]])
        assert states.last is None and before.last is not None
        assert torch.equal(states.aux, before.aux)
        again = likeliest.of(before.last)
        for name in ("ids", "logs", "rest", "choices"):
            assert torch.equal(getattr(states.top, name), getattr(again, name))
    manifest = read_json(stages.folder / "manifest.json")
    hidden = target["hidden_size"]
    assert manifest["bytes_per_token"] == 4 + 3 * (hidden + 4) + 5 * 6 + 8
    # A second capture finds all of it.
    before = (stages.folder / "manifest.json").read_bytes()
    with monkeypatch.context() as patch:
        forbid_the_model(patch)
        patch.setattr("capture_states.TargetWeights", None)
        capture(stages)
    assert (stages.folder / "manifest.json").read_bytes() == before


def test_what_nobody_left_is_captured_to_the_same_end(stages: Stages) -> None:
    capture(stages)
    converted = {tuple(states.token_ids): states for _, states in stored(stages)}
    for path in (stages.folder / "store/hidden_states").glob("*/*.safetensors"):
        path.unlink()
    capture(stages)
    for _, states in stored(stages):
        before = converted[tuple(states.token_ids)]
        torch.testing.assert_close(states.aux, before.aux, rtol=0.14, atol=0.05)
        assert (states.top.choices == before.top.choices).float().mean() > 0.9
        torch.testing.assert_close(states.top.rest, before.top.rest, rtol=0.05, atol=0.02)


def test_another_vocabulary_converts_anew_and_is_told_apart(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(stages)
    target = read_json(stages.folder / "target.json")
    first = read_captures([stages.folder / "manifest.json"], target)
    ids = read_json(stages.folder / "vocabulary.json")["token_ids"]
    check_draft_vocabulary(first, ids)
    with pytest.raises(GateError, match="hold top tokens of the draft vocabulary"):
        check_draft_vocabulary(first, ids[1:])
    write_vocabulary(stages, ids[1:])
    forbid_the_model(monkeypatch)
    capture(stages)
    second = read_captures([stages.folder / "manifest.json"], target)
    assert not first.digests.keys() & second.digests.keys()
    check_draft_vocabulary(second, ids[1:])


def test_no_room_is_told_before_any_work(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_the_model(monkeypatch)
    with pytest.raises(Exception, match=r"disk_reserve") as told:
        capture(stages, "--disk-reserve", str(10**18))
    assert type(told.value).__name__ == "DiskError" and DATASET in str(told.value)
    stages.write_prompts(map(question, range(QUESTIONS + 1)))
    monkeypatch.setattr("tiny_target.STATES", {**SETTINGS, "disk_reserve": 10**18})
    with pytest.raises(Exception, match=r"tokens of questions at least take"):
        stages.answer()
    logging.getLogger().handlers.clear()
