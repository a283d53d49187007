"""A training run on disk: with its weights and moments all that is needed to go on with it to the bit."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eyrie.config import TrainingSettings
from eyrie.eagle3.model import Drafter
from eyrie.records import atomic_write, canonical_json
from eyrie.store import StoreError

_CURVE_POINTS = 100
_MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_FILE = "state.safetensors"
_LOCK = "lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run's folder from every other process for as long as the block; made where it is not there.

    Raises StoreError where another process has it: a training that a killed build left behind, say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"{folder} is being trained in by another process\n  expected: one at a time\n"
                "  change: wait for the other training, or stop it, and run again"
            ) from error
        yield


@dataclass
class RunState:
    """How far a run is, and what it has measured; with the weights and moments, all that a resume needs.

    The order of the samples follows from seed and epoch alone, so there is no generator to save, and the
    steps without a better validation follow from `validation`. best: the point of `validation` with the
    longest acceptance length. best_weights: the weights there, on the CPU. processes: how many there were,
    each number once.
    """

    step: int = 0
    finished: bool = False
    losses: list[float] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    processes: list[int] = field(default_factory=list)
    best: dict[str, Any] | None = None
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def loss_curve(self) -> list[dict[str, float]]:
        """Mean losses of up to _CURVE_POINTS equal stretches, each with its last step."""
        size = max(1, math.ceil(len(self.losses) / _CURVE_POINTS))
        starts = range(0, len(self.losses), size)
        stretches = [self.losses[start : start + size] for start in starts]
        return [
            {"step": start + len(losses), "loss": sum(losses) / len(losses)}
            for start, losses in zip(starts, stretches, strict=True)
        ]

    def add_validation(self, point: dict[str, Any], drafter: Drafter) -> None:
        """Add a validation's figures; where they are the best ones, keep the drafter's weights."""
        self.validation.append(point)
        length = point["acceptance_length"]
        if length is not None and (self.best is None or length > self.best["acceptance_length"]):
            self.best = point
            self.best_weights = {
                name: weight.detach().to("cpu", copy=True) for name, weight in drafter.named_parameters()
            }

    def ends_early(self, settings: TrainingSettings) -> bool:
        """Whether training.early_stop epochs have passed since the best validation, at an epoch's end."""
        if settings.early_stop is None or self.best is None:
            return False
        return self.validation[-1]["epoch"] - self.best["epoch"] >= settings.early_stop


def read_run(folder: Path, drafter: Drafter, optimiser: torch.optim.Optimizer | None) -> RunState:
    """The run saved in the folder, its weights put into the drafter; a new one where there is none.

    optimiser: takes the moments of an unfinished run. Raises StoreError for a file that can't be read.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return RunState()
    try:
        with safe_open(path, framework="pt") as handle:
            state = RunState(**json.loads(handle.metadata()["run"]))
            for name, parameter in drafter.named_parameters():
                parameter.data.copy_(handle.get_tensor(name))
                if state.best is not None:
                    state.best_weights[name] = handle.get_tensor(f"best.{name}").clone()
                if optimiser is not None and not state.finished:
                    moments = {
                        moment: handle.get_tensor(f"{moment}.{name}").to(parameter.device, copy=True)
                        for moment in _MOMENTS
                    }
                    step = torch.tensor(float(state.step), device=parameter.device)
                    optimiser.state[parameter] = {"step": step, **moments}
    except (SafetensorError, KeyError, TypeError, RuntimeError, OSError, ValueError) as error:
        raise StoreError(
            f"{path} is not the state of this training: {error}. Delete it and run again to start afresh."
        ) from error
    return state


def save_run(folder: Path, drafter: Drafter, optimiser: torch.optim.Optimizer, state: RunState) -> None:
    """Write the run's state in place of the one before, atomically. A finished run needs no moments."""
    tensors = {f"best.{name}": weight for name, weight in state.best_weights.items()}
    for name, parameter in drafter.named_parameters():
        tensors[name] = parameter.data
        if not state.finished:
            tensors |= {f"{moment}.{name}": optimiser.state[parameter][moment] for moment in _MOMENTS}
    run = canonical_json(_plain(state))
    for stale in folder.glob(f".{STATE_FILE}.*.tmp"):
        stale.unlink()
    with atomic_write(folder / STATE_FILE) as file:
        file.write(save({name: tensor.cpu() for name, tensor in tensors.items()}, metadata={"run": run}))


def _plain(state: RunState) -> Mapping[str, Any]:
    """The state without its tensors."""
    values = dict(vars(state))
    del values["best_weights"]
    return values


def keep_weights(drafter: Drafter, state: RunState, keep: str, folder: Path) -> dict[str, Any] | None:
    """Put the weights that become the checkpoint into the drafter of a finished run.

    keep: last or best. Returns the validation point of the best ones, None for the last ones. Raises
    StoreError where no best weights were kept.
    """
    if keep == "last":
        return None
    if state.best is None:
        raise StoreError(
            f"training.keep: best, but the run in {folder} has no best validation point: it was trained "
            "without validation rows long enough to measure on, or before such points were kept. Set "
            "training.keep: last, or delete the folder and run again to train anew"
        )
    for name, parameter in drafter.named_parameters():
        parameter.data.copy_(state.best_weights[name])
    return state.best
