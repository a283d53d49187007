from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie.config import ConfigError, HiddenStatesSettings
from eyrie.gates import GateError
from eyrie.journals import Journal, StoreError
from eyrie.records import read_json, write_jsonl
from eyrie.states import states_recipe
from eyrie.store import StateStore
from tiny_target import DATASET, RECIPE, STATES, Stages, forbid_the_model, question

QUESTIONS = 24


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages(tmp_path / "build", monkeypatch)
    stages.write_prompts(map(question, range(QUESTIONS)))
    return stages


def keys(lines: list[bytes]) -> list[str]:
    return [json.loads(line)["key"] for line in lines]


def recipe(**sampling: Any) -> dict[str, Any]:
    return {**RECIPE, "sampling": {**RECIPE["sampling"], **sampling}}


def test_rows_hold_prompt_and_answer_and_the_states_are_in_the_store(stages: Stages) -> None:
    stages.answer()
    rows = stages.samples()
    assert [row["id"] for row in rows] == sorted(question(number)["id"] for number in range(QUESTIONS))
    for row in rows:
        first = row["loss_mask"].index(1)
        assert row["loss_mask"] == [0] * first + [1] * (len(row["input_ids"]) - first)
        ended = row["input_ids"][-1] == 2
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert len(row["input_ids"]) - first == 16 or ended
    ledger = stages.ledger()
    assert ledger["in"] == ledger["kept"] == QUESTIONS
    assert sum(ledger["finish_reasons"].values()) == QUESTIONS
    assert min(ledger["finish_reasons"].values()) > 0
    assert sum(ledger["supervised_tokens"].values()) == sum(sum(row["loss_mask"]) for row in rows)

    target = read_json(stages.folder / "target.json")
    settings = HiddenStatesSettings(**STATES)
    store = StateStore(stages.folder / "store", states_recipe(target, settings, "float32"))
    refs = store.find(store.key(row["input_ids"]) for row in rows)
    states = list(store.load([refs[store.key(row["input_ids"])] for row in rows]))
    assert [state.token_ids for state in states] == [row["input_ids"] for row in rows]
    assert {state.aux.dtype for state in states} == {torch.bfloat16}


def test_what_is_in_the_store_needs_no_model(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    stages.answer()
    stages.capture()
    before = stages.results()
    for name in before:
        (stages.folder / name).unlink()
    forbid_the_model(monkeypatch)
    stages.answer()
    stages.capture()
    assert stages.results() == before


def test_killed_and_run_again_ends_as_an_undisturbed_run(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stages.start("answer_prompts", *stages.answering()) as process:
        deadline = time.monotonic() + 120
        while len(stages.journal()) < 5:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    answered = stages.journal()
    assert 5 <= len(answered) < QUESTIONS
    assert not (stages.folder / "tokenized_data.jsonl").exists()

    stages.answer()
    stages.capture()
    assert stages.journal()[: len(answered)] == answered
    assert len(set(keys(stages.journal()))) == len(stages.journal()) == QUESTIONS

    undisturbed = Stages(tmp_path / "undisturbed", monkeypatch)
    undisturbed.write_prompts(map(question, range(QUESTIONS)))
    undisturbed.answer()
    undisturbed.capture()
    assert stages.results() == undisturbed.results()


def test_a_torn_line_is_answered_again(stages: Stages) -> None:
    stages.answer()
    before, lines = (stages.folder / "tokenized_data.jsonl").read_bytes(), stages.journal()
    journal = next((stages.folder / "store/answers").glob("*/*.jsonl"))
    journal.write_bytes(journal.read_bytes()[:-7])
    assert len(stages.journal()) == QUESTIONS - 1
    stages.answer()
    assert stages.journal() == lines
    assert (stages.folder / "tokenized_data.jsonl").read_bytes() == before


def test_states_that_got_lost_are_captured_anew(stages: Stages) -> None:
    stages.answer()
    stages.capture()
    before = stages.results()
    shards = sorted((stages.folder / "store/hidden_states").glob("*/*.safetensors"))
    for shard in shards[::2]:
        shard.unlink()
    stages.capture()
    manifest = json.loads(before["manifest.json"])
    again = read_json(stages.folder / "manifest.json")
    assert [sample["key"] for sample in again["samples"]] == [s["key"] for s in manifest["samples"]]
    assert again["counts"] == manifest["counts"]
    store = StateStore(
        stages.folder / "store",
        states_recipe(
            read_json(stages.folder / "target.json"),
            HiddenStatesSettings(**STATES),
            "float32",
        ),
    )
    assert len(store.find(sample["key"] for sample in again["samples"])) == QUESTIONS


def test_a_second_writer_is_refused(stages: Stages) -> None:
    stages.write_prompts([question(0)])
    stages.answer()
    stages.write_prompts(map(question, range(3)))
    journal = Journal(next((stages.folder / "store/answers").glob("*/*.jsonl")))
    with journal, pytest.raises(StoreError, match="written by another process"):
        stages.answer()


def test_rows_that_come_and_go_touch_no_other_answer(stages: Stages) -> None:
    stages.answer()
    before = stages.journal()
    stages.write_prompts(map(question, range(3, QUESTIONS + 2)))
    stages.answer()
    after = stages.journal()
    assert after[:QUESTIONS] == before
    assert len(after) == QUESTIONS + 2
    assert len(stages.samples()) == QUESTIONS - 1


def test_cut_answers_can_be_left_out_without_asking_again(stages: Stages) -> None:
    stages.answer()
    before, cut = stages.journal(), stages.ledger()["finish_reasons"]["length"]
    stages.answer(recipe(keep_truncated=False))
    ledger = stages.ledger()
    assert stages.journal() == before
    assert ledger["skipped"] == {"truncated": cut}
    assert ledger["kept"] == QUESTIONS - cut == len(stages.samples())


def test_other_sampling_asks_again(stages: Stages) -> None:
    stages.answer()
    stages.answer(recipe(temperature=0.8))
    assert len(list((stages.folder / "store/answers").glob("*/*.jsonl"))) == 2


def test_equal_prompts_are_asked_once(stages: Stages) -> None:
    twin = {**question(0), "id": "f" * 32}
    stages.write_prompts([question(0), twin, question(1)])
    stages.answer()
    assert len(stages.journal()) == 2
    assert len(stages.samples()) == 3


def test_prompts_that_fit_no_answer_are_counted(stages: Stages) -> None:
    long = question(QUESTIONS)
    long["messages"] = [{"role": "user", "content": "a long one " * 4096}]
    refused = {**question(QUESTIONS + 1), "messages": [{"role": "user", "content": None}]}
    stages.write_prompts([*map(question, range(4)), long, refused])
    stages.answer()
    assert stages.ledger()["skipped"] == {"prompt_too_long": 1, "template_error": 1}
    assert stages.ledger()["in"] == 6


def test_gates_speak(stages: Stages) -> None:
    with pytest.raises(GateError, match=r"prompts cut at max_new_tokens"):
        stages.answer({**recipe(max_new_tokens=1), "gates": {"max_truncated_share": 0.1}})
    stages.write_prompts([])
    with pytest.raises(GateError, match=r"0 of 0 rows became samples"):
        stages.answer()
    assert not (stages.folder / "tokenized_data.jsonl").exists()


def conversation(number: int, answer: str = "By calling sort on it.") -> dict[str, Any]:
    row = question(number)
    row["messages"].append({"role": "assistant", "content": answer})
    return row


def tokenize(stages: Stages, rows: list[dict[str, Any]], **changes: Any) -> None:
    write_jsonl(stages.folder / "conversations.jsonl", rows)
    settings = {
        "version": 1,
        "loss_on": "assistant",
        "max_tokens": 200,
        "native_model": "somebody/Tiny",
        "on_native_mismatch": "refuse",
        "split": RECIPE["split"],
        "gates": {},
        **changes,
    }
    stages.run(
        "tokenize_conversations",
        *("--dataset", DATASET, "--conversations", "conversations.jsonl", "--target", "target.json"),
        *("--target-path", "target", "--recipe", json.dumps(settings)),
        *("--out", "tokenized_data.jsonl", "--ledger", "ledger.json"),
    )


def test_native_conversations_keep_their_answers(stages: Stages) -> None:
    silent = {**question(8), "messages": question(8)["messages"]}
    rows = [conversation(0), conversation(1), conversation(2, "long " * 400), silent]
    with pytest.raises(GateError, match=r"1 of 4 loss masks are all zero \(25\.0%\)"):
        tokenize(stages, rows)
    tokenize(stages, rows, gates={"max_unsupervised_share": 0.25})
    ledger = stages.ledger()
    assert ledger["native_model_is_target"] is True
    assert ledger["skipped"] == {"no_supervised_text": 1, "too_long": 1}
    for row in stages.samples():
        assert row["finish_reason"] == "native"
        assert 0 < sum(row["loss_mask"]) < len(row["input_ids"])
    stages.capture()
    assert read_json(stages.folder / "manifest.json")["counts"]["samples"] == 2


def test_rows_that_came_with_tokens_keep_them(stages: Stages) -> None:
    own = {"id": "b", "group": "b", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]}
    foreign = {**own, "id": "c", "input_ids": [5, 6, 1 << 30, 8]}
    tokenize(stages, [own, foreign, conversation(0)])
    assert stages.ledger()["skipped"] == {"foreign_token_id": 1}
    row = next(row for row in stages.samples() if row["id"] == "b")
    assert (row["input_ids"], row["loss_mask"], row["finish_reason"]) == (
        [5, 6, 7, 8],
        [0, 1, 1, 0],
        "native",
    )


def test_another_models_answers_are_refused_or_recorded(stages: Stages) -> None:
    with pytest.raises(ConfigError, match=r"native_model: the answers are kimi/K2's, the target is tiny"):
        tokenize(stages, [conversation(0)], native_model="kimi/K2")
    tokenize(stages, [conversation(0)], native_model="kimi/K2", on_native_mismatch="warn")
    assert stages.ledger()["native_model_is_target"] is False


def test_target_json_of_another_template_is_refused(stages: Stages) -> None:
    document = read_json(stages.folder / "target.json")
    (stages.folder / "target.json").write_text(json.dumps({**document, "template_sha256": "0"}))
    with pytest.raises(ConfigError, match=r"run scripts/identify_target.py again"):
        stages.answer()
