from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from eyrie.engines import Answered, Failed, Result
from eyrie.progress import AnsweringProgress
from eyrie.records import read_json

LOG = logging.getLogger("progress")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """What the progress asks of an engine."""

    def __init__(self, running: int = 0, errors: dict[str, int] | None = None) -> None:
        self._running, self._errors = running, errors or {}

    def running(self) -> int:
        return self._running

    def errors(self) -> dict[str, int]:
        return self._errors

    def described(self) -> dict[str, Any]:
        return {}

    def answer(self, *_: object) -> Any:
        raise AssertionError


def answers(count: int, tokens: int) -> list[Result]:
    return [Answered(str(number), [7] * tokens, "length") for number in range(count)]


def test_the_figures_add_up(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "one.progress.json"
    progress = AnsweringProgress("questions", 100, LOG, path, clock)
    engine = Engine(8, {"timeout": 3})
    clock.now += 10
    progress.update([*answers(20, 50), Failed("x", "aborted", "")], engine)
    assert read_json(path) == progress.figures(engine)
    assert progress.figures(engine) == {
        "dataset": "questions",
        "state": "running",
        "total": 100,
        "answered": 20,
        "failed": 1,
        "running": 8,
        "tokens": 1000,
        "seconds": 10.0,
        "answers_per_second": 2.0,
        "tokens_per_second": 100.0,
        "seconds_left": 39.5,
        "errors": {"timeout": 3},
    }
    progress.close(engine, "stopped")
    assert read_json(path)["state"] == "stopped"


def test_the_tail_counts() -> None:
    """Eight at once, of which one takes 200 times as long as the others: the end waits for such a one."""
    clock = Clock()
    progress = AnsweringProgress("questions", 1000, LOG, None, clock)
    clock.now += 10
    progress.update([*answers(99, 10), *answers(1, 2000)], Engine(8))
    speed = (99 * 10 + 2000) / 10 / 8
    assert progress.seconds_left(8) == pytest.approx((900 - 8) / 10 + 2000 / speed)
    # Once all have begun, time runs off the longest.
    clock.now += 90
    progress.update(answers(892, 10), Engine(8))
    begun = progress.seconds_left(8)
    clock.now += 5
    assert progress.seconds_left(8) < begun
    progress.update(answers(8, 10), Engine(0))
    assert progress.seconds_left(0) == 0.0


def test_rates_are_those_of_the_last_minutes() -> None:
    clock = Clock()
    progress = AnsweringProgress("questions", 10_000, LOG, None, clock)
    for _ in range(600):
        clock.now += 1
        progress.update(answers(10, 1), Engine(8))
    for _ in range(600):
        clock.now += 1
        progress.update(answers(1, 1), Engine(8))
    assert progress.rates()[0] == pytest.approx(1.0)


def test_a_log_gets_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO):
        progress = AnsweringProgress("questions", 100, LOG, None, clock)
        for _ in range(30):
            clock.now += 1
            progress.update(answers(1, 4), Engine(8, {"reset": 2}))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith("10 of 100 answers, 0 failed, 8 running, 1.00/s, 4 tokens/s, 40 tokens, ")
    assert lines[0].endswith("s left, 2 reset")
