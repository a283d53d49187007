"""The training loop: a schedule known in advance, resumable to the bit, validated once an epoch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eyrie.config import TrainingSettings
from eyrie.console import Progress
from eyrie.eagle3.batches import Batch, Sample, make_batch, plan_steps
from eyrie.eagle3.loss import unrolled_loss
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.validation import validate
from eyrie.gates import GateError
from eyrie.records import atomic_write, canonical_json
from eyrie.store import StoreError
from eyrie.target import DTYPES

_FINAL_RATE = 0.02
_CURVE_POINTS = 100
STATE_FILE = "state.safetensors"


@dataclass
class RunState:
    """How far a run is, and what it has measured; with the weights and moments, all that a resume needs.

    The order of the samples follows from seed and epoch alone, so there is no generator to save.
    """

    step: int = 0
    finished: bool = False
    losses: list[float] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def loss_curve(self) -> list[dict[str, float]]:
        """Mean losses of up to _CURVE_POINTS equal stretches, each with its last step."""
        size = max(1, math.ceil(len(self.losses) / _CURVE_POINTS))
        starts = range(0, len(self.losses), size)
        stretches = [self.losses[start : start + size] for start in starts]
        return [
            {"step": start + len(losses), "loss": sum(losses) / len(losses)}
            for start, losses in zip(starts, stretches, strict=True)
        ]


def learning_rate(step: int, total: int, settings: TrainingSettings) -> float:
    """The rate of a step: a linear rise over warmup_steps, then a cosine down to 2 % of the peak."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return peak * (_FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


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
                if optimiser is not None and not state.finished:
                    optimiser.state[parameter] = {
                        "step": torch.tensor(float(state.step)),
                        "exp_avg": handle.get_tensor(f"exp_avg.{name}").clone(),
                        "exp_avg_sq": handle.get_tensor(f"exp_avg_sq.{name}").clone(),
                    }
    except (SafetensorError, KeyError, TypeError, RuntimeError, OSError, ValueError) as error:
        raise StoreError(
            f"{path} is not the state of this training: {error}. Delete it and run again to start afresh."
        ) from error
    return state


def _save_run(folder: Path, drafter: Drafter, optimiser: torch.optim.Optimizer, state: RunState) -> None:
    tensors = {}
    for name, parameter in drafter.named_parameters():
        tensors[name] = parameter.data
        if not state.finished:
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = optimiser.state[parameter][moment]
    with atomic_write(folder / STATE_FILE) as file:
        file.write(save(tensors, metadata={"run": canonical_json(asdict(state))}))


@dataclass(frozen=True)
class Lessons:
    """The training samples that have something to teach, and every step's share of them.

    places: the supervised places of each sample. steps: epoch (from 1) and sample indices, step by step.
    """

    samples: Sequence[Sample]
    places: Sequence[torch.Tensor]
    steps: Sequence[tuple[int, list[int]]]

    @classmethod
    def plan(cls, samples: Sequence[Sample], t2d: torch.Tensor, settings: TrainingSettings) -> Lessons:
        """The whole course, known in advance. Raises GateError where there is nothing to learn."""
        pairs = [(sample, sample.supervised(t2d, settings.position_mask)) for sample in samples]
        pairs = [(sample, place) for sample, place in pairs if len(place)]
        if not pairs:
            raise GateError(
                f"none of the {len(samples)} training rows has a supervised token that the drafter can "
                "propose\n  change: drafter.draft_vocab_size, or look at the loss masks of the rows"
            )
        epochs = plan_steps([len(place) for _, place in pairs], settings)
        steps = [(number, step) for number, epoch in enumerate(epochs, start=1) for step in epoch]
        return cls([sample for sample, _ in pairs], [place for _, place in pairs], steps)

    def batch(self, step: int, ttt_steps: int) -> Batch:
        """The batch of a step."""
        indices = self.steps[step][1]
        return make_batch([self.samples[i] for i in indices], [self.places[i] for i in indices], ttt_steps)

    def ends_epoch(self, step: int) -> bool:
        """Whether the step is the last one of its epoch."""
        return step + 1 == len(self.steps) or self.steps[step][0] != self.steps[step + 1][0]

    def places_from(self, step: int) -> int:
        """How many supervised places the steps from this one on visit."""
        return sum(len(self.places[i]) for _, indices in self.steps[step:] for i in indices)


def train(
    drafter: Drafter,
    head_rows: torch.Tensor,
    train_samples: Sequence[Sample],
    validation_samples: Sequence[Sample],
    settings: TrainingSettings,
    folder: Path,
    log: logging.Logger,
    after_step: Callable[[int], None] | None = None,
) -> RunState:
    """Train the drafter, going on from what the folder holds; returns the finished run.

    head_rows: [D, H] float32, the target head's rows of the draft vocabulary. folder: of this run alone, in
    the store. after_step: called with the number of steps done, after each of them. Raises GateError where
    there is nothing to learn, or the loss is no longer a number.
    """
    lessons = Lessons.plan(train_samples, drafter.t2d, settings)
    total = len(lessons.steps)
    optimiser = torch.optim.AdamW(
        drafter.parameters(), betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    state = read_run(folder, drafter, optimiser)
    state.counts = {
        "train_rows": len(train_samples),
        "train_rows_without_supervision": len(train_samples) - len(lessons.samples),
        "train_candidates": sum(len(sample.candidates) for sample in train_samples),
        "train_places": sum(len(place) for place in lessons.places),
        "validation_rows": len(validation_samples),
        "epochs": settings.epochs,
        "steps": total,
    }
    if state.step:
        log.info("going on after step %d of %d", state.step, total)
    progress = Progress(lessons.places_from(state.step), "tokens", log)
    for step in range(state.step, total):
        batch = lessons.batch(step, settings.ttt_steps)
        rate = learning_rate(step, total, settings)
        state.losses.append(_optimise(drafter, optimiser, batch, head_rows, rate, settings))
        state.step = step + 1
        if not math.isfinite(state.losses[-1]):
            raise GateError(
                f"the loss is {state.losses[-1]} at step {state.step}; expected a number\n"
                "  change: a lower training.learning_rate or training.clip_norm"
            )
        progress.advance(len(batch.choices), f"step {state.step} of {total}, loss {state.losses[-1]:.3f}")
        if lessons.ends_epoch(step) and validation_samples:
            figures = validate(drafter, validation_samples, settings.ttt_steps)
            state.validation.append({"step": state.step, "epoch": lessons.steps[step][0], **figures})
            log.info(_in_words(state.validation[-1]))
        state.finished = state.step == total
        if state.finished or state.step % settings.checkpoint_every == 0:
            _save_run(folder, drafter, optimiser, state)
        if after_step is not None:
            after_step(state.step)
    progress.close()
    return state


def _optimise(
    drafter: Drafter,
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    head_rows: torch.Tensor,
    rate: float,
    settings: TrainingSettings,
) -> float:
    """One step on a batch; returns its loss."""
    for group in optimiser.param_groups:
        group["lr"] = rate
    loss = unrolled_loss(drafter, batch, head_rows, settings, DTYPES[settings.dtype])
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), settings.clip_norm)
    optimiser.step()
    optimiser.zero_grad()
    return float(loss.detach())


def _in_words(point: dict[str, Any]) -> str:
    length = point["acceptance_length"]
    shares = " ".join("-" if share is None else f"{share:.3f}" for share in point["teacher_forced"])
    return (
        f"epoch {point['epoch']}, step {point['step']}: validation acceptance length "
        f"{'unknown' if length is None else f'{length:.3f}'}, right when teacher-forced {shares}"
    )
