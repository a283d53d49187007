"""The answering command with servers: what reaches the store and the ledger, and what a signal leaves."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyrie.config import ConfigError
from eyrie.engines import EngineError
from eyrie.gates import GateError
from eyrie.records import read_json
from eyrie.serving import ServerError
from fault_server import FaultServer, generated
from tiny_target import DATASET, RECIPE, Stages, question

QUESTIONS = 40
FAST = {"backoff": 0.01, "request_timeout": 60.0, "retries": 8, "ready_timeout": 60.0, "stop_grace": 5.0}


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages(tmp_path / "build", monkeypatch)
    stages.write_prompts(map(question, range(QUESTIONS)))
    return stages


def served(stages: Stages, shape: Any = "vllm", **settings: Any) -> FaultServer:
    target = read_json(stages.folder / "target.json")
    return FaultServer(shape, vocab_size=target["vocab_size"], eos_ids=tuple(target["eos_ids"]), **settings)


def engine(server: FaultServer, **changes: Any) -> dict[str, Any]:
    return {"kind": server.shape, "urls": [server.url], **FAST, **changes}


def recipe(gates: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    return {**RECIPE, "gates": gates or {}, "sampling": {**RECIPE["sampling"], **sampling}}


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
def test_rows_hold_what_the_server_gave_in_the_order_of_the_prompts(stages: Stages, shape: str) -> None:
    with served(stages, shape, delay=0.005) as server:
        stages.answer(engine=engine(server))
        rows = stages.samples()
        assert [row["id"] for row in rows] == sorted(question(number)["id"] for number in range(QUESTIONS))
        for row in rows:
            first = row["loss_mask"].index(1)
            answer, reason = generated(row["input_ids"][:first], None, 16, server.serving)
            assert (row["input_ids"][first:], row["finish_reason"]) == (answer, reason)
        before, asked = (stages.folder / "tokenized_data.jsonl").read_bytes(), server.asked.total()
        (described,) = stages.ledger()["engines"]
        assert (described["engine"], described["version"]) == (shape, "0.0-stand-in")
    # Nothing is missing, so that nobody is asked, whatever the settings.
    stages.answer(engine={"kind": "vllm", "urls": ["http://127.0.0.1:9"], "command": "x {port}"})
    assert (stages.folder / "tokenized_data.jsonl").read_bytes() == before
    assert asked == QUESTIONS
    assert not (stages.folder / "store/hidden_states").exists()


def test_one_row_edited_of_a_thousand_is_one_new_request(stages: Stages) -> None:
    rows = [question(number) for number in range(1000)]
    stages.write_prompts(rows)
    with served(stages) as server:
        stages.answer(engine=engine(server))
        assert server.asked.total() == 1000
        rows[500] = question(1000)
        stages.write_prompts(rows)
        stages.answer(engine=engine(server))
        assert server.asked.total() == 1001
        assert len(stages.samples()) == 1000


@pytest.mark.parametrize(
    ("changes", "wanted", "words"),
    [
        ({"model": "other", "model_path": "other"}, {}, "another model"),
        ({"context_length": 40}, {}, "too short a context"),
        (
            {"speculative_algorithm": "EAGLE"},
            {"draft": {"algorithm": "EAGLE3"}},
            "--speculative-algorithm EAGLE3",
        ),
        ({"hidden_width": 7168}, {"draft": {"hidden_width": 21504}}, "7168 columns"),
    ],
)
def test_a_wrong_server_is_asked_for_no_answer(
    stages: Stages, changes: dict[str, Any], wanted: dict[str, Any], words: str
) -> None:
    with served(stages, "sglang", **changes) as server, pytest.raises(EngineError, match=words):
        stages.answer(engine=engine(server, **wanted))
    assert not server.asked
    assert not stages.journal()


def test_a_server_with_other_answers_than_before_is_refused(stages: Stages) -> None:
    with served(stages) as server:
        stages.answer(engine=engine(server))
    stages.write_prompts(map(question, range(QUESTIONS + 5)))
    with served(stages, salt="other weights") as server:
        with pytest.raises(EngineError, match=r"canary differs from the one in .*at token 0"):
            stages.answer(engine=engine(server))
        assert not server.asked


def test_other_engines_and_numbers_ask_nothing_again(stages: Stages) -> None:
    stages.answer()
    journal = stages.journal()
    with served(stages) as server:
        stages.answer({**recipe(max_in_flight=3), "dtype": "bfloat16"}, engine(server))
        stages.answer(recipe(drop_degenerate=True), engine(server))
        assert not server.asked
    assert stages.journal() == journal


def test_what_fails_is_counted_judged_and_asked_by_the_next_run(stages: Stages) -> None:
    with served(stages, faults={"abort": 0.5}, last_faulty_attempt=2) as server:
        settings = engine(server, retries=0)
        with pytest.raises(GateError, match=r"prompts without an answer"):
            stages.answer(engine=settings)
        answered = len(stages.journal())
        assert 0 < answered < QUESTIONS
        assert not (stages.folder / "tokenized_data.jsonl").exists()
        stages.answer(recipe({"max_failed_share": 0.9}), settings)
        failed = stages.ledger()["skipped"]["failed:aborted"]
        assert failed == server.faults["abort"] - (QUESTIONS - answered)
        assert answered < len(stages.journal()) == stages.ledger()["kept"] == QUESTIONS - failed
        stages.answer(engine=settings)
        assert (stages.ledger()["kept"], stages.ledger()["skipped"]) == (QUESTIONS, {})
        assert server.asked.total() == QUESTIONS + (QUESTIONS - answered) + failed


def test_a_dataset_has_its_own_number_of_requests_at_once(stages: Stages) -> None:
    with served(stages, delay=0.02) as server:
        command = [
            *stages.answering(recipe(), engine(server)),
            "--in-flight",
            json.dumps({DATASET: 3, "b": 9}),
        ]
        stages.run("answer_prompts", *command)
        assert server.most_running == 3
        assert stages.ledger()["kept"] == QUESTIONS


def test_loops_are_counted_and_left_out_by_recipe(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("answer_prompts.is_degenerate", lambda ids: len(ids) < 6)
    with served(stages) as server:
        stages.answer(engine=engine(server))
        loops = stages.ledger()["degenerate"]
        assert 0 < loops < QUESTIONS == stages.ledger()["kept"]
        stages.answer(recipe(drop_degenerate=True), engine(server))
        assert stages.ledger()["skipped"] == {"degenerate": loops}
        assert stages.ledger()["kept"] == QUESTIONS - loops == len(stages.samples())
        assert server.asked.total() == QUESTIONS


def test_a_server_kind_without_a_server_is_refused(stages: Stages) -> None:
    with pytest.raises(ConfigError, match=r"engine.*kind vllm without urls or command"):
        stages.answer(engine={"kind": "vllm"})


def test_sigterm_keeps_what_was_running_and_the_next_run_goes_on(stages: Stages) -> None:
    stages.write_prompts(map(question, range(400)))
    with served(stages, delay=0.2) as server:
        settings = engine(server)
        command = [*stages.answering(recipe(max_in_flight=16), settings), "--log", "logs/answers.log"]
        with stages.start("answer_prompts", *command) as process:
            deadline = time.monotonic() + 120
            while len(stages.journal()) < 20:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"stopped by SIGTERM; what was finished is in the store" in said
        progress = read_json(stages.folder / "logs/answers.progress.json")
        assert progress["state"] == "stopped"
        # All that was asked was waited for, and is in the store.
        assert progress["answered"] == len(stages.journal()) == server.asked.total() < 400
        assert not (stages.folder / "tokenized_data.jsonl").exists()
        stages.answer(recipe(max_in_flight=64), settings)
        assert set(server.asked.values()) == {1}
        assert len(stages.samples()) == 400


def test_a_server_that_dies_at_work_is_started_again_and_nothing_is_lost(stages: Stages) -> None:
    target = read_json(stages.folder / "target.json")
    record = stages.folder / "asked.txt"
    serving = {
        "vocab_size": target["vocab_size"],
        "eos_ids": target["eos_ids"],
        "model": "tiny",
        "delay": 0.05,
        "dies_after": 12,
        "record": str(record),
    }
    server = shlex.join([sys.executable, str(Path(__file__).with_name("fault_server.py"))])
    settings = {
        "kind": "vllm",
        **FAST,
        "command": f"{server} --port {{port}} --settings '{json.dumps(serving)}'",
    }
    with pytest.raises(ServerError, match="ended after 1 restarts with status 3"):
        stages.answer(recipe(max_in_flight=4), engine={**settings, "restarts": 1})
    assert 0 < len(stages.journal()) < QUESTIONS
    stages.answer(recipe(max_in_flight=4), engine=settings)
    assert len(stages.samples()) == len(stages.journal()) == QUESTIONS


def test_the_command_line_keeps_its_engine_out_of_the_key(stages: Stages) -> None:
    with served(stages) as server:
        stages.answer(engine=engine(server))
    (folder,) = (stages.folder / "store/answers").iterdir()
    described = json.loads((folder / "recipe.json").read_text())
    assert set(described) == {"version", "target_revision", "template_sha256", "sampling"}
    assert set(described["sampling"]) == {"max_new_tokens", "temperature", "top_p"}
