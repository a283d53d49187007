"""Training on a tiny target's own answers: it learns, it resumes to the bit, it refuses what it can't use."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import train_drafter
from eyrie.config import ConfigError, TrainingSettings
from eyrie.console import start_log
from eyrie.eagle3 import trainer
from eyrie.eagle3.batches import plan_steps
from eyrie.eagle3.checkpoint import load_drafter
from eyrie.eagle3.processes import Processes
from eyrie.eagle3.run_state import RunState
from eyrie.eagle3.samples import CheckedStates, find_choices, read_captures, read_rows
from eyrie.eagle3.trainer import learning_rate
from eyrie.eagle3.validation import walk
from eyrie.gates import GateError
from eyrie.records import RecordError, read_json, read_jsonl, write_json, write_jsonl
from eyrie.store import StateStore, StoreError
from eyrie.target_weights import TargetWeights
from tiny_eagle3 import TinyBuild, make_tiny_build, random_drafter, random_sample, tiny_recipe


class Killed(Exception):
    """The end of a run that had no say in it."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    return make_tiny_build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def build(original: TinyBuild, tmp_path: Path) -> TinyBuild:
    return original.copied(tmp_path / "build")


def run(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_drafter.py", *arguments])
    train_drafter.main()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def kill_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    def callback(done: int) -> None:
        if done == steps:
            raise Killed

    def train(*arguments: Any) -> RunState:
        return trainer.train(*arguments, after_step=callback)

    monkeypatch.setattr(train_drafter, "train", train)


@pytest.mark.parametrize("mask_shift", ["aligned", "legacy"])
def test_a_greedy_answer_tells_the_targets_choices(build: TinyBuild, mask_shift: str) -> None:
    target = read_json(build.folder / "target.json")
    captures = read_captures([build.folder / "manifest.json"], target)
    states = StateStore(build.folder / "store", captures.recipe)
    rows = read_rows([build.folder / "tokenized_data.jsonl"], states, captures)
    head = TargetWeights(build.folder / "target", target["files"]).head(True)
    assert all(row.greedy for row in rows)
    checked = CheckedStates(rows, states, captures)
    told, found = (
        find_choices(asked, checked, head, mask_shift, Processes(), start_log("test", None))
        for asked in (rows, [replace(row, greedy=False) for row in rows])
    )
    pairs = list(zip(told, found, strict=True))
    equal = torch.cat([a == b for a, b in pairs])
    # States are stored with fewer digits than the answers were made with, so a near-tie may fall otherwise.
    assert equal.float().mean() > 0.98
    assert all((choices >= 0).all() for choices, _ in pairs)


def test_it_learns(build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build.recipe = tiny_recipe(epochs=10, learning_rate=3e-3, initialise="random")
    run(monkeypatch, build.arguments(tmp_path / "out"))
    training = read_json(tmp_path / "out" / "training.json")
    losses = [point["loss"] for point in training["loss"]]
    assert sum(losses[-5:]) < sum(losses[:5])
    first, last = training["validation"][0], training["validation"][-1]
    assert last["acceptance_length"] > first["acceptance_length"] + 0.2 > 1.2
    assert all(
        late > early for early, late in zip(first["teacher_forced"], last["teacher_forced"], strict=True)
    )
    assert training["counts"]["steps"] == training["loss"][-1]["step"]


@pytest.mark.parametrize("initialise", ["target_layer", "least_squares"])
def test_same_inputs_give_the_same_bytes_and_a_resumed_run_too(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, initialise: str
) -> None:
    build.recipe = tiny_recipe(initialise=initialise)
    run(monkeypatch, build.arguments(tmp_path / "undisturbed"))
    expected = files(tmp_path / "undisturbed")
    assert sorted(expected) == ["config.json", "model.safetensors", "training.json"]
    store = tmp_path / "other-store"
    shutil.copytree(build.store / "hidden_states", store / "hidden_states")
    # Before the first save, between saves, at a save and at an epoch's end; the last run is left to finish.
    steps = read_json(tmp_path / "undisturbed" / "training.json")["counts"]["steps"]
    assert steps > 20
    for stop in (1, 6, 8, steps // 3, steps - 1):
        with monkeypatch.context() as patch:
            kill_after(patch, stop)
            with pytest.raises(Killed):
                run(patch, build.arguments(tmp_path / "resumed", store))
        assert not (tmp_path / "resumed").exists()
    run(monkeypatch, build.arguments(tmp_path / "resumed", store))
    assert files(tmp_path / "resumed") == expected


def test_saving_more_often_and_another_order_of_rows_change_nothing(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, build.arguments(tmp_path / "first"))
    path = build.folder / "tokenized_data.jsonl"
    write_jsonl(path, list(read_jsonl(path))[::-1])
    shutil.rmtree(build.store / "drafters")
    run(monkeypatch, [*build.arguments(tmp_path / "second"), "--aside", json.dumps({"checkpoint_every": 1})])
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == (
        tmp_path / "second" / "model.safetensors"
    ).read_bytes()


def test_seed_changes_the_drafter(build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, build.arguments(tmp_path / "first"))
    build.recipe = tiny_recipe(seed=1)
    run(monkeypatch, build.arguments(tmp_path / "second"))
    assert files(tmp_path / "first")["model.safetensors"] != files(tmp_path / "second")["model.safetensors"]


def test_finished_run_is_found(
    build: TinyBuild,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, build.arguments(tmp_path / "first"))
    # Without the states nothing could be trained anew.
    shutil.rmtree(build.store / "hidden_states")
    run(monkeypatch, build.arguments(tmp_path / "second"))
    assert "found the finished training" in capsys.readouterr().err
    assert files(tmp_path / "first") == files(tmp_path / "second")


@pytest.mark.parametrize(
    "training",
    [
        {"initialise": "random"},
        {"initialise": "least_squares"},
        {"mask_shift": "legacy"},
        {"dtype": "bfloat16"},
        {"ttt_steps": 1},
    ],
    ids=lambda training: "-".join(map(str, *training.items())),
)
def test_every_setting_trains(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, training: dict[str, Any]
) -> None:
    build.recipe = tiny_recipe(epochs=4, **training)
    run(monkeypatch, build.arguments(tmp_path / "out"))
    losses = [point["loss"] for point in read_json(tmp_path / "out" / "training.json")["loss"]]
    assert sum(losses[-10:]) < sum(losses[:10])
    embedding = TargetWeights(build.folder / "target", read_json(build.folder / "target.json")["files"])
    load_drafter(tmp_path / "out", embedding.embedding(), torch.float32)


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    data = read_json(path)
    change(data)
    write_json(path, data)


def lose_manifest_entry(build: TinyBuild) -> None:
    change_json(build.folder / "manifest.json", lambda data: data["samples"].pop())


def lose_shards(build: TinyBuild) -> None:
    for path in build.store.glob("hidden_states/*/*.safetensors"):
        path.unlink()


def change_states(build: TinyBuild) -> None:
    for path in build.store.glob("hidden_states/*/*.safetensors"):
        tensors = load_file(path)
        tensors["last_hidden_state"][-1, -1] += 1
        save_file(tensors, path)


def other_width(build: TinyBuild) -> None:
    change_json(build.folder / "manifest.json", lambda data: data.update(width=128))


def other_layers(build: TinyBuild) -> None:
    change_json(build.folder / "manifest.json", lambda data: data.update(layer_ids=[0, 1, 2]))


def nothing_to_train_on(build: TinyBuild) -> None:
    path = build.folder / "tokenized_data.jsonl"
    write_jsonl(path, [{**row, "split": "validation"} for row in read_jsonl(path)])


def nothing_supervised(build: TinyBuild) -> None:
    path = build.folder / "tokenized_data.jsonl"
    write_jsonl(path, [{**row, "loss_mask": [0] * len(row["loss_mask"])} for row in read_jsonl(path)])


def other_weights(build: TinyBuild) -> None:
    path = build.folder / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path)


def another_size(build: TinyBuild) -> None:
    build.recipe["drafter"]["draft_vocab_size"] = 47


def wider_mlp(build: TinyBuild) -> None:
    build.recipe["drafter"]["intermediate_size"] = 64


def odd_heads(build: TinyBuild) -> None:
    build.recipe["drafter"]["num_attention_heads"] = 3


def huge_rate(build: TinyBuild) -> None:
    build.recipe["training"] |= {"learning_rate": 1e30, "warmup_steps": 0}


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lose_manifest_entry, StoreError, "1 of 40 rows have no hidden states in the manifests"),
        (lose_shards, StoreError, "the states of 40 of 40 rows are gone"),
        (change_states, StoreError, "have digest .*; the manifest says"),
        (other_width, GateError, r"states of 128 numbers for layers \[1, 2, 3\]; expected 96"),
        (other_layers, StoreError, "40 of 40 rows have no hidden states"),
        (nothing_to_train_on, GateError, "no row to train on among 50"),
        (nothing_supervised, GateError, "none of the 30 training rows has a supervised token"),
        (other_weights, ConfigError, "not the file that target.json describes"),
        (another_size, ConfigError, "draft_vocab_size: saw 47, but the vocabulary holds 48"),
        (wider_mlp, ConfigError, r"mlp.gate_proj has shape \[48, 32\] there; expected \[64, 32\]"),
        (odd_heads, ConfigError, "num_attention_heads: saw 3, expected a multiple"),
        (huge_rate, GateError, "the loss is nan|the loss is inf"),
    ],
)
def test_unfit_input_is_refused_in_words(
    build: TinyBuild,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    damage: Callable[[TinyBuild], None],
    error: type[Exception],
    words: str,
) -> None:
    damage(build)
    with pytest.raises(error, match=words):
        run(monkeypatch, build.arguments(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_manifests_that_disagree_are_refused(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = build.folder / "other.json"
    shutil.copy(build.folder / "manifest.json", other)
    change_json(other, lambda data: data.update(dtype="float32"))
    arguments = build.arguments(tmp_path / "out")
    arguments.insert(arguments.index("--manifests") + 1, str(other))
    with pytest.raises(GateError, match="captured differently"):
        run(monkeypatch, arguments)


def test_a_mask_of_another_length_is_refused(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = build.folder / "tokenized_data.jsonl"
    write_jsonl(path, [{**row, "loss_mask": row["loss_mask"][1:]} for row in read_jsonl(path)])
    with pytest.raises(RecordError, match="tokens and a mask of"):
        run(monkeypatch, build.arguments(tmp_path / "out"))


def test_damaged_state_of_a_run_is_refused(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            run(patch, build.arguments(tmp_path / "out"))
    (state,) = build.store.glob("drafters/*/state.safetensors")
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(StoreError, match="is not the state of this training"):
        run(monkeypatch, build.arguments(tmp_path / "out"))


@given(
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=40),
    tokens_per_step=st.integers(1, 300),
    epochs=st.integers(1, 3),
)
def test_every_epoch_visits_every_sample_once(counts: list[int], tokens_per_step: int, epochs: int) -> None:
    settings = TrainingSettings(epochs=epochs, tokens_per_step=tokens_per_step)
    plan = plan_steps(counts, settings)
    assert plan == plan_steps(counts, settings) and len(plan) == epochs
    for epoch in plan:
        assert sorted(index for step in epoch for index in step) == list(range(len(counts)))
        assert all(epoch)
        for step in epoch:
            # A step is off by less than the sample at either of its ends.
            assert sum(counts[index] for index in step) <= 1.5 * tokens_per_step + max(counts)


def test_epochs_differ_in_order() -> None:
    first, second = plan_steps([5] * 30, TrainingSettings(epochs=2, tokens_per_step=20))
    assert first != second


def test_schedule_rises_and_falls_to_two_per_cent() -> None:
    settings = TrainingSettings(learning_rate=1.0, warmup_steps=4)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[3:] == sorted(rates[3:], reverse=True)
    assert 0.02 < rates[-1] < 0.022


def test_walk_jumps_over_what_it_accepts() -> None:
    """A drafter made to say one token over and over, on answers where it is right a known number of times."""
    drafter = random_drafter(draft_vocabulary=4)
    said = int(drafter.draft_token_ids()[2])
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
        drafter.norm.weight.fill_(1.0)
        drafter.fc.weight[0, 0] = 1.0
        drafter.lm_head.weight[2, 0] = 1.0
    head = torch.zeros(96, 32)
    other = said + 1
    sample = random_sample(0, [0] * 3 + [1] * 9, head)
    sample.aux[:, 0] = 1.0
    # Answer from token 3 on. The cycle after token 3 accepts 2 tokens and gets the target's own token 6;
    # the one after token 6 accepts none, and the one after token 7 all 3. Token 11 then has too few behind.
    answer = [other, said, said, other, other, said, said, said, other]
    sample.token_ids[3:] = torch.tensor(answer)
    figures = walk(drafter, [sample], 3)
    assert figures["cycles"] == 3
    assert figures["accepted_at"] == [2 / 3, 2 / 3, 1 / 3]
    assert figures["acceptance_length"] == pytest.approx(1 + 5 / 3)
    assert walk(drafter, [random_sample(0, [1, 1, 1], head)], 3)["acceptance_length"] is None


def test_recipe_defaults_are_those_of_the_configuration() -> None:
    assert json.loads(json.dumps(tiny_recipe()))["training"].keys() <= TrainingSettings.model_fields.keys()
