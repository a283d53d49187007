"""Several turns: each is asked on the target's own answers, once, and the whole is one sample."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from eyrie.records import content_key
from tiny_target import DATASET, Stages, forbid_the_model

FOLLOWING = ["And why is that?", "Please say it in other words.", "Thank you, and what comes next?"]


def conversation(number: int, turns: int) -> dict[str, Any]:
    """A row of prompts.jsonl; numbers that differ by 8 begin alike."""
    texts = [
        f"Tell me about number {number % 8}, please.",
        *(f"{FOLLOWING[i]} {number}" for i in range(turns - 1)),
    ]
    key = content_key("prompt", *texts)
    return {
        "id": key,
        "dataset": DATASET,
        "group": key,
        "messages": [{"role": "user", "content": text} for text in texts],
        "turns": [1] * turns,
    }


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages(tmp_path / "build", monkeypatch)
    stages.write_prompts(conversation(number, 1 + number % 4) for number in range(16))
    return stages


def answers_of(row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """What was read and what was generated, answer by answer."""
    ids, found, at = row["input_ids"], [], 0
    for generated, run in groupby(row["loss_mask"]):
        length = len(list(run))
        if generated:
            found.append((ids[:at], ids[at : at + length]))
        at += length
    return found


def test_each_turn_is_asked_with_all_tokens_before_it(stages: Stages) -> None:
    stages.answer()
    stored = {row["key"]: row["token_ids"] for row in map(json.loads, stages.journal())}
    used = set()
    several = 0
    for row in stages.samples():
        answers = answers_of(row)
        several += len(answers) > 1
        for before, answer in answers:
            assert stored[content_key(before)] == answer
            used.add(content_key(before))
        # All answers but the last ended by themselves: nobody replies to one that was cut.
        assert all(answer[-1] == 2 for _, answer in answers[:-1])
    assert several >= 4
    assert used == set(stored), "nothing was asked that no sample holds"
    assert len(stages.journal()) == len(stored), "nothing was asked twice"
    ledger = stages.ledger()
    assert ledger["in"] == ledger["kept"] == 16
    assert ledger["turns"] == {"turns": 40, "failed": 0}
    assert sum(ledger["finish_reasons"].values()) == sum(len(answers_of(row)) for row in stages.samples())


def test_a_rerun_asks_nothing_and_states_are_those_of_the_last_pass(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages.answer()
    stages.capture()
    before = stages.results()
    forbid_the_model(monkeypatch)
    stages.answer()
    stages.capture()
    assert stages.results() == before


def test_one_more_turn_asks_only_for_itself(stages: Stages) -> None:
    stages.answer()
    before = stages.journal()
    rows = [conversation(number, 1 + number % 4) for number in range(16)]
    ended = next(row for row in stages.samples() if row["finish_reason"] == "stop")
    row = next(row for row in rows if row["id"] == ended["id"])
    row["messages"].append({"role": "user", "content": "One more thing."})
    row["turns"].append(1)
    stages.write_prompts(rows)
    stages.answer()
    assert stages.journal()[: len(before)] == before
    assert len(stages.journal()) == len(before) + 1
