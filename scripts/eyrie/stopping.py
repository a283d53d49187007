"""A wish to stop: SIGINT and SIGTERM let running work finish for a while; a second one ends it at once."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self, TypeVar, cast

from eyrie.errors import BuildError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_ONE_WISH = 1.0
_LOOK_SECONDS = 0.1

T = TypeVar("T")


class Stopped(BuildError):
    """The work was interrupted and can be gone on with."""


class StopRequest:
    """Whether somebody wishes the work to stop, and since when. With `with`, signals are such a wish.

    A signal that the process was started to ignore (Ctrl-C for a job in a shell's background) stays ignored.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.cause = ""
        self._since: float | None = None
        self._former: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """No new work is to be begun."""
        return self._since is not None

    @property
    def expired(self) -> bool:
        """Running work has had its time, too."""
        return self._since is not None and time.monotonic() - self._since >= self.grace

    def request(self, cause: str) -> None:
        """Wish the work to stop; `cause` says why, for the message."""
        if self._since is None:
            self.cause = cause
            self._since = time.monotonic()

    def stopped(self) -> Stopped:
        """The error to end with."""
        return Stopped(
            f"stopped by {self.cause}; what was finished is in the store, and the same command goes on "
            "from there"
        )

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._since is not None:
            # One wish may come as several signals: of the terminal, handed on, and for each dying thread.
            if time.monotonic() - self._since >= _ONE_WISH:
                raise KeyboardInterrupt
            return
        name = signal.Signals(number).name
        self.request(name)
        logging.getLogger(__name__).info(
            "%s: no new work is begun; what is running has %.0f s, a second signal ends it at once",
            *(name, self.grace),
        )


def unless_stopped(stop: StopRequest, work: Callable[[], T]) -> T:
    """What `work` returns or raises; a wish to stop is not kept waiting for it, and raises Stopped.

    Work that is left behind, an unanswered request say, ends with the process.
    """
    outcome: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    while not stop.requested:
        try:
            value, error = outcome.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return cast(T, value)
    raise stop.stopped()


def end_with_snakemake() -> None:
    """Where Snakemake started this process, have the kernel send SIGTERM here once Snakemake is gone.

    A killed Snakemake would else leave its jobs running, and the next build would find their journals locked.
    A command that was started by hand goes on without the shell that started it.
    """
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:  # no such file system, or no such process any more
        return
    if b"snakemake" not in [os.path.basename(word) for word in words[:3]]:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)
