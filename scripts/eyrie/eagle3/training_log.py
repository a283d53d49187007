"""A run's log: a line of JSON for each step and validation, without gaps or repeats however it is stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from eyrie.config import ConfigError
from eyrie.eagle3.run_state import RunState
from eyrie.records import atomic_write, json_line

LOG_FILE = "training.jsonl"
# What no second run repeats.
_RATE = "tokens_per_second"


class TrainingLog:
    """The log of one run, gone on with from the step that its state was saved at.

    A line: {"step", "epoch", "loss", "loss_by_step", "right_by_step", "learning_rate", "gradient_norm",
    "tokens", "tokens_per_second"}, or {"step", "epoch", "validation": figures}. tensorboard: also write the
    numbers as TensorBoard's event files.
    """

    def __init__(self, folder: Path, state: RunState, tensorboard: bool) -> None:
        self._path = folder / LOG_FILE
        self._state = state
        self._board = _board(folder, state.step) if tensorboard else None
        self._file: IO[bytes] | None = None
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        rewind(self._path, self._state)
        self._file = self._path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Add a step's line; `tokens` says how many supervised positions it had."""
        now = time.monotonic()
        rate = line["tokens"] / max(now - self._last, 1e-9)
        self._last = now
        self._add({**line, _RATE: round(rate, 1)})

    def add_validation(self, point: Mapping[str, Any]) -> None:
        """Add a validation's figures; its time counts for no step."""
        figures = {key: value for key, value in point.items() if key not in ("step", "epoch")}
        self._add({"step": point["step"], "epoch": point["epoch"], "validation": figures})
        self._last = time.monotonic()

    def _add(self, line: dict[str, Any]) -> None:
        assert self._file is not None, "used outside of `with`"
        self._file.write(json_line(line))
        if self._board is not None:
            for name, value in _scalars(line):
                self._board.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Make all lines durable, before the run's state is saved: the log may be ahead of it, not behind."""
        assert self._file is not None, "used outside of `with`"
        self._file.flush()
        os.fsync(self._file.fileno())


def rewind(path: Path, state: RunState) -> None:
    """Cut the log to what the state knows of; what a former version did not log is told by its losses."""
    kept: list[bytes] = []
    logged = 0
    for data in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        line = _whole(data)
        if line is None or line["step"] > state.step:
            break
        kept.append(data)
        logged = line["step"]
    losses = enumerate(state.losses[logged:], start=logged + 1)
    kept += [json_line({"step": step, "loss": loss}) for step, loss in losses]
    with atomic_write(path) as file:
        file.writelines(kept)


def _whole(data: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(data) if data.endswith(b"\n") else None
    except ValueError:
        return None


def write_log(folder: Path, out: Path, rates: bool) -> None:
    """Write the finished run's log to `out`; without rates it is the same bytes each time."""
    with (folder / LOG_FILE).open("rb") as lines, atomic_write(out) as file:
        for data in lines:
            line = json.loads(data)
            if not rates:
                line.pop(_RATE, None)
            file.write(json_line(line))


def check_tensorboard() -> None:
    """Raises ConfigError where training.tensorboard asks for what is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401, PLC0415 - it is no part of the environment
    except ImportError as error:
        raise ConfigError(
            f"training.tensorboard: true needs the package tensorboard, but: {error}. "
            "Install it (pip install tensorboard), or set training.tensorboard: false"
        ) from error


def _board(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - see above

    # Events of steps that are taken again are marked as void.
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def _scalars(line: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The numbers of a line with their names; those of a list each with its place."""
    scalars = []
    for name, value in {**line, **line.get("validation", {})}.items():
        values = value if isinstance(value, list) else [value]
        for place, number in enumerate(values):
            if name not in ("step", "epoch") and isinstance(number, int | float):
                scalars.append((f"{name}/{place}" if isinstance(value, list) else name, float(number)))
    return scalars
