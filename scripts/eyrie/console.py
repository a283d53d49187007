"""What a stage's command shares with the others: its log, its progress, and how it ends."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from eyrie.errors import BuildError

_SECONDS_BETWEEN_LINES = 10.0


def start_log(name: str, log: Path | None) -> logging.Logger:
    """A logger that writes to standard error and, where Snakemake asks for one, to the job's log file."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log, mode="w", encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=f"{name}: %(message)s", handlers=handlers, force=True)
    for chatty in ("httpx", "filelock", "transformers", "torch"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return logging.getLogger(name)


def run_command(main: Callable[[], None]) -> None:
    """Run a command's main function; a mistake that has words ends it with them and status 1.

    What is not foreseen keeps its traceback: hiding it would hide the fault.
    """
    try:
        main()
    except BuildError as error:
        logging.getLogger().error("FAILED\n%s", error)
        sys.exit(1)


class Progress:
    """Counts finished work: a bar on a terminal, elsewhere a line every ten seconds with rate and ETA."""

    def __init__(self, total: int, unit: str, log: logging.Logger) -> None:
        self._total = total
        self._unit = unit
        self._log = log
        self._done = 0
        self._start = self._last_line = time.monotonic()
        self._bar = tqdm(total=total, unit=unit, leave=False) if sys.stderr.isatty() else None

    def advance(self, amount: int, note: str = "") -> None:
        """Count `amount` more as done; `note` says what else is worth knowing."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
            self._bar.set_postfix_str(note)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            rate = self._done / (now - self._start)
            left = (self._total - self._done) / rate if rate else 0.0
            self._log.info(
                "%d of %d %s, %.1f/s, %.0f s left %s", self._done, self._total, self._unit, rate, left, note
            )

    def close(self) -> float:
        """End the bar; returns the seconds since the start."""
        if self._bar is not None:
            self._bar.close()
        return time.monotonic() - self._start
