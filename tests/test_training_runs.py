"""What a run keeps and tells: its best weights, its log, its end before time, and all that over kills."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyrie.config import ConfigError, TrainingSettings
from eyrie.eagle3 import run_state, trainer, training_log
from eyrie.eagle3.run_state import RunState, held
from eyrie.eagle3.training_log import rewind
from eyrie.records import read_json, read_jsonl, write_jsonl
from eyrie.store import StoreError
from tiny_eagle3 import TinyBuild, make_tiny_build, random_drafter
from training_runs import files, run, settings, trained


class Killed(Exception):
    """The end of a run that had no say in it."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    return make_tiny_build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def build(original: TinyBuild, tmp_path: Path) -> TinyBuild:
    return original.copied(tmp_path / "build")


def point(step: int, epoch: int, length: float | None) -> dict[str, Any]:
    return {"step": step, "epoch": epoch, "acceptance_length": length, "teacher_forced": [0.5], "rows": 1}


def fixed_lengths(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> None:
    """Validations that find these acceptance lengths, one after the other."""
    found = iter(lengths)

    def validate(*_: object) -> dict[str, Any]:
        return {"rows": 1, "teacher_forced": [None], "acceptance_length": next(found)}

    monkeypatch.setattr(trainer, "validate", validate)


def log_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "training.jsonl"))


def test_best_and_last_are_both_kept(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = build.arguments(tmp_path / "last")
    with monkeypatch.context() as patch:
        fixed_lengths(patch, [1.2, 1.7, 1.5])
        run(patch, arguments)
    steps = [at["step"] for at in read_json(tmp_path / "last" / "training.json")["validation"]]
    settings(build, keep="best")
    # Nothing is trained again: no validation is left to be had.
    run(monkeypatch, build.arguments(tmp_path / "best"))
    best = read_json(tmp_path / "best" / "training.json")
    assert best["kept"]["step"] == steps[1] and best["kept"]["acceptance_length"] == 1.7
    # The best weights are those that the run had at that step.
    shutil.rmtree(build.store / "drafters")
    with monkeypatch.context() as patch:
        fixed_lengths(patch, [1.2, 1.7, 1.5])
        train = trainer.train

        def stop(done: int) -> None:
            if done == steps[1]:
                raise Killed

        patch.setattr("train_drafter.train", lambda *a: train(*a, after_step=stop))
        settings(build, checkpoint_every=1)
        with pytest.raises(Killed):
            run(patch, build.arguments(tmp_path / "stopped"))
    there = trained(build)
    kept = load_file(tmp_path / "best" / "model.safetensors")
    assert all(torch.equal(kept[name], weight.bfloat16()) for name, weight in there.items())
    last = load_file(tmp_path / "last" / "model.safetensors")
    assert not torch.equal(last["fc.weight"], kept["fc.weight"])


def test_training_ends_when_it_gets_no_better(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings(build, epochs=9, early_stop=2)
    fixed_lengths(monkeypatch, [1.2, 1.7, 1.5, 1.6])
    run(monkeypatch, [*build.arguments(tmp_path / "out"), "--training-log", str(tmp_path / "training.jsonl")])
    training = read_json(tmp_path / "out" / "training.json")
    assert [at["epoch"] for at in training["validation"]] == [1, 2, 3, 4]
    assert training["stopped_after"] == training["validation"][-1]["step"] < training["counts"]["steps"]
    assert training["loss"][-1]["step"] == training["stopped_after"]
    # It is finished: a further run finds it, and validates nothing.
    run(monkeypatch, build.arguments(tmp_path / "again"))
    assert files(tmp_path / "again") == files(tmp_path / "out")


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        ([1.0, 1.1, 1.2], [False, False, False]),
        ([1.2, 1.1, 1.1], [False, False, True]),
        ([1.2, 1.1, 1.3, 1.3, 1.2], [False, False, False, False, True]),
        # A length that is as good is no better, and one that is not there is none.
        ([1.2, None, 1.2], [False, False, True]),
        ([None, None, None], [False, False, False]),
    ],
)
def test_early_stop_counts_epochs_from_the_best(lengths: list[float | None], ends: list[bool]) -> None:
    state, drafter = RunState(), random_drafter()
    found = []
    for epoch, length in enumerate(lengths, start=1):
        state.add_validation(point(10 * epoch, epoch, length), drafter)
        found.append(state.ends_early(TrainingSettings(early_stop=2)))
    assert found == ends


def test_validation_comes_more_often_when_asked(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings(build, validate_every=4)
    run(monkeypatch, build.arguments(tmp_path / "out"))
    training = read_json(tmp_path / "out" / "training.json")
    steps = training["counts"]["steps"]
    epoch_ends = {at["step"] for at in training["validation"] if at["step"] % 4}
    assert {at["step"] for at in training["validation"]} == {*range(4, steps + 1, 4), *epoch_ends}
    assert len(epoch_ends) + steps // 4 == len(training["validation"]) and steps in {
        at["step"] for at in training["validation"]
    }


def test_best_without_validation_rows_is_refused(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = build.folder / "tokenized_data.jsonl"
    rows = [row for row in read_jsonl(path) if row["split"] != "validation"]
    write_jsonl(path, rows)
    settings(build, keep="best")
    with pytest.raises(ConfigError, match=r"training.keep: best .* validation rows, but there is none"):
        run(monkeypatch, build.arguments(tmp_path / "out"))


def test_the_log_tells_every_step(build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = ["--training-log", str(tmp_path / "training.jsonl")]
    run(monkeypatch, [*build.arguments(tmp_path / "out"), *log, "--rates"])
    lines, training = log_of(tmp_path), read_json(tmp_path / "out" / "training.json")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, training["counts"]["steps"] + 1))
    assert sum(line["tokens"] for line in steps) == 3 * training["counts"]["train_places"]
    for line in steps:
        parts = [0.8**i * loss for i, loss in enumerate(line["loss_by_step"])]
        assert line["loss"] == pytest.approx(sum(parts), rel=1e-5)
        assert line["tokens_per_second"] > 0 and line["gradient_norm"] > 0
    points = [line for line in lines if "validation" in line]
    assert [line["validation"]["acceptance_length"] for line in points] == [
        at["acceptance_length"] for at in training["validation"]
    ]
    # Without rates it is the same bytes each time.
    run(monkeypatch, [*build.arguments(tmp_path / "out"), *log])
    first = (tmp_path / "training.jsonl").read_bytes()
    shutil.rmtree(build.store / "drafters")
    run(monkeypatch, [*build.arguments(tmp_path / "out"), *log])
    assert (tmp_path / "training.jsonl").read_bytes() == first and b"per_second" not in first


def test_right_guesses_are_those_that_validation_counts(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At rate zero the first step's share of right guesses is what a validation of its samples finds."""
    settings(build, learning_rate=1e-12, tokens_per_step=10_000, epochs=1)
    path = build.folder / "tokenized_data.jsonl"
    train = [row for row in read_jsonl(path) if row["split"] == "train"]
    # The same rows validate; each has its states once in the store.
    write_jsonl(path, [*train, *({**row, "split": "validation"} for row in train)])
    run(monkeypatch, [*build.arguments(tmp_path / "out"), "--training-log", str(tmp_path / "training.jsonl")])
    step, validation = log_of(tmp_path)
    places = read_json(tmp_path / "out" / "training.json")["counts"]
    share = places["train_places"] / places["train_candidates"]
    seen = [right * share for right in step["right_by_step"]]
    assert seen == pytest.approx(validation["validation"]["teacher_forced"], abs=0.02)


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int, late: bool) -> Iterator[None]:
    """A kill at the n-th call of a function: before it does anything, or after it did."""
    function, calls = getattr(module, name), []

    def replacement(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == call and not late:
            raise Killed
        result = function(*arguments, **named)
        if len(calls) == call:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(module, name, replacement)
        with pytest.raises(Killed):
            yield


def test_a_run_killed_anywhere_ends_with_the_same_bytes(
    original: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between a step's line and its save, before and after a save, in a validation, and after it."""

    def made(name: str) -> tuple[TinyBuild, list[str]]:
        build = original.copied(tmp_path / name)
        settings(build, validate_every=3, early_stop=2, micro_batch_tokens=40)
        out, log = tmp_path / f"{name}-out", tmp_path / f"{name}-out" / "training.jsonl"
        return build, [*build.arguments(out), "--training-log", str(log)]

    _, arguments = made("undisturbed")
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, arguments)
    _, arguments = made("killed")
    for module, name, call, late in (
        (trainer, "save_run", 1, False),
        (trainer, "save_run", 2, True),
        (trainer, "validate", 2, False),
        (trainer, "unrolled_loss", 9, False),
        (training_log.TrainingLog, "sync", 2, True),
        (training_log.TrainingLog, "add_validation", 1, True),
        (training_log, "atomic_write", 1, False),
        (run_state, "save", 1, True),
    ):
        with killed(monkeypatch, module, name, call, late):
            run(monkeypatch, arguments)
    run(monkeypatch, arguments)
    undisturbed, disturbed = (files(tmp_path / f"{name}-out") for name in ("undisturbed", "killed"))
    # The manifests name their parents by path.
    here, there = (json.loads(made.pop("training.json")) for made in (undisturbed, disturbed))
    assert list(here.pop("parents").values()) == list(there.pop("parents").values())
    assert here == there
    assert undisturbed == disturbed


def test_a_torn_log_is_mended_and_an_old_one_filled(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    lines = [{"step": n, "loss": float(n)} for n in (1, 2, 3)]
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"step": 4, "lo')
    rewind(path, RunState(step=3, losses=[1.0, 2.0, 3.0]))
    assert log_of(tmp_path) == lines
    rewind(path, RunState(step=2, losses=[1.0, 2.0]))
    assert log_of(tmp_path) == lines[:2]
    # A run that was begun before there was a log has its losses alone.
    path.unlink()
    rewind(path, RunState(step=3, losses=[1.0, 2.0, 3.0]))
    assert log_of(tmp_path) == lines


def test_a_state_of_the_former_format_is_gone_on_with(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, build.arguments(tmp_path / "first"))
    (path,) = build.store.glob("drafters/*/state.safetensors")
    with safe_open(path, framework="pt") as handle:
        former = json.loads(handle.metadata()["run"])
    for newer in ("best", "processes"):
        del former[newer]
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("best.")}
    save_file(tensors, path, metadata={"run": json.dumps(former)})
    run(monkeypatch, build.arguments(tmp_path / "second"))
    assert files(tmp_path / "first") == files(tmp_path / "second")
    settings(build, keep="best")
    with pytest.raises(StoreError, match="has no best validation point"):
        run(monkeypatch, build.arguments(tmp_path / "best"))


def test_tensorboard_is_asked_for_before_anything_else(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    arguments = [*build.arguments(tmp_path / "out"), "--aside", '{"tensorboard": true}']
    with pytest.raises(ConfigError, match="needs the package tensorboard"):
        run(monkeypatch, arguments)


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Board:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

        def close(self) -> None:
            self.scalars.append(("closed", 0.0, 0))

    board = Board()
    monkeypatch.setattr(training_log, "_board", lambda folder, step: board)
    with training_log.TrainingLog(tmp_path, RunState(), tensorboard=True) as log:
        log.add_step({"step": 1, "epoch": 1, "loss": 2.5, "loss_by_step": [1.0, None], "tokens": 8})
        log.add_validation(point(1, 1, None))
    assert ("loss", 2.5, 1) in board.scalars and ("loss_by_step/0", 1.0, 1) in board.scalars
    assert ("teacher_forced/0", 0.5, 1) in board.scalars and board.scalars[-1][0] == "closed"


def test_a_device_that_is_not_there_is_an_error(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"training.device: cuda needs a CUDA device"):
        run(monkeypatch, [*build.arguments(tmp_path / "out"), "--aside", '{"device": "cuda"}'])


def test_a_run_has_one_trainer_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(StoreError, match="by another process")
    with held(tmp_path / "run"), refused, held(tmp_path / "run"):
        pass
    with held(tmp_path / "run"):
        pass
