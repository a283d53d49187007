"""How far the answering of a dataset is: for a terminal, for a log, and for a dashboard."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eyrie.engines import Answered, Engine, Result
from eyrie.records import write_json

# The rates are those of the last minutes: a server that came or went shows soon.
_WINDOW = 300.0
_SECONDS_BETWEEN_FILES = 3.0
_FIRST_LINES, _LATER_LINES = 10.0, 60.0


class AnsweringProgress:
    """Counts answers, tokens and failures, and says how long the rest will take.

    On a terminal there is a bar, elsewhere a line every ten seconds and later every minute. Where `path` is
    given, a JSON file is kept there with the same figures; it is no result of the build.
    """

    def __init__(
        self,
        dataset: str,
        total: int,
        log: logging.Logger,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dataset = dataset
        self._total = total
        self._log = log
        self._path = path
        self._clock = clock
        self._start = self._last_line = clock()
        self._last_file = float("-inf")
        self.answered = self.failed = self.tokens = 0
        self._longest = 0
        self._marks: deque[tuple[float, int, int]] = deque([(self._start, 0, 0)])
        self._end: float | None = None
        """When the last one to begin should have ended; known once all have begun."""
        self._bar = tqdm(total=total, unit="answers", leave=False) if sys.stderr.isatty() else None

    def update(self, group: Sequence[Result], engine: Engine) -> None:
        """Count a group of results, which may be empty, and tell of it where it is time to."""
        for one in group:
            if isinstance(one, Answered):
                self.answered += 1
                self.tokens += len(one.token_ids)
                self._longest = max(self._longest, len(one.token_ids))
            else:
                self.failed += 1
        self._mark(engine.running())
        if self._bar is not None:
            self._bar.update(len(group))
        self._tell(engine)

    def figures(self, engine: Engine, state: str = "running") -> dict[str, Any]:
        """What progress.json holds. Seconds and rates are of this run; `errors` are attempts by kind."""
        answers, tokens = self.rates()
        return {
            "dataset": self._dataset,
            "state": state,
            "total": self._total,
            "answered": self.answered,
            "failed": self.failed,
            "running": engine.running(),
            "tokens": self.tokens,
            "seconds": round(self._clock() - self._start, 1),
            "answers_per_second": round(answers, 3),
            "tokens_per_second": round(tokens, 1),
            "seconds_left": round(self.seconds_left(engine.running()), 1),
            "errors": dict(sorted(engine.errors().items())),
        }

    def rates(self) -> tuple[float, float]:
        """Answers and tokens per second in the last minutes."""
        (start, answers, tokens), now = self._marks[0], self._clock()
        seconds = now - start
        if seconds <= 0.0:
            return 0.0, 0.0
        return (self.answered - answers) / seconds, (self.tokens - tokens) / seconds

    def seconds_left(self, running: int) -> float:
        """An estimate that counts the tail: the last answer to begin may be as long as the longest so far.

        It takes the time until the rest has begun, and then that of one long answer at the speed that an
        answer has now; or the rest at the present rate, if that is more.
        """
        answers, _ = self.rates()
        left = self._total - self.answered - self.failed
        if not left or not answers:
            return 0.0
        if self._end is not None:
            tail = self._end - self._clock()
        else:
            tail = (left - running) / answers + self._longest_seconds(running)
        return max(left / answers, tail)

    def _longest_seconds(self, running: int) -> float:
        """How long one as long as the longest so far takes, at the speed that each running answer has now."""
        tokens = self.rates()[1]
        return self._longest * running / tokens if tokens else 0.0

    def close(self, engine: Engine, state: str) -> None:
        """End the bar and write the file once more; state: done, stopped or failed."""
        if self._bar is not None:
            self._bar.close()
        seconds = self._clock() - self._start
        self._log.info(
            "%s: %d answers, %d tokens in %.1f s, %.0f tokens/s, %d without an answer%s",
            *(state, self.answered, self.tokens, seconds, self.tokens / max(seconds, 1e-9), self.failed),
            _listed(engine.errors()),
        )
        self._write(engine, state)

    def _mark(self, running: int) -> None:
        now = self._clock()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self.answered, self.tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW:
            self._marks.popleft()
        if self._end is None and self._total - self.answered - self.failed <= running:
            self._end = now + self._longest_seconds(running)

    def _tell(self, engine: Engine) -> None:
        now = self._clock()
        if now - self._last_file >= _SECONDS_BETWEEN_FILES:
            self._last_file = now
            self._write(engine, "running")
        answers, tokens = self.rates()
        words = (
            f"{tokens:.0f} tokens/s, {self.tokens} tokens, {self.seconds_left(engine.running()):.0f} s left"
            f"{_listed(engine.errors())}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(words)
            return
        if now - self._last_line >= (_FIRST_LINES if now - self._start < 600.0 else _LATER_LINES):
            self._last_line = now
            self._log.info(
                "%d of %d answers, %d failed, %d running, %.2f/s, %s",
                *(self.answered, self._total, self.failed, engine.running(), answers, words),
            )

    def _write(self, engine: Engine, state: str) -> None:
        if self._path is not None:
            write_json(self._path, self.figures(engine, state))


def _listed(errors: Mapping[str, int]) -> str:
    return "".join(f", {count} {kind}" for kind, count in sorted(errors.items()))
