"""The training loop: a schedule known in advance, resumable to the bit, validated once an epoch or more."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyrie.config import TrainingSettings
from eyrie.console import Progress
from eyrie.eagle3.figures import Figures
from eyrie.eagle3.lessons import Lessons, Part
from eyrie.eagle3.loss import unrolled_loss
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.moving import moved
from eyrie.eagle3.prefetch import prefetched
from eyrie.eagle3.processes import ALONE, Processes
from eyrie.eagle3.run_state import RunState, read_run, save_run
from eyrie.eagle3.samples import StoredSamples
from eyrie.eagle3.training_log import TrainingLog
from eyrie.eagle3.validation import validate
from eyrie.gates import GateError
from eyrie.target import DTYPES

_FINAL_RATE = 0.02


def learning_rate(step: int, total: int, settings: TrainingSettings) -> float:
    """The rate of a step: a linear rise over warmup_steps, then a cosine down to 2 % of the peak."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return peak * (_FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    drafter: Drafter,
    head_rows: torch.Tensor,
    train_samples: StoredSamples,
    validation_samples: StoredSamples,
    settings: TrainingSettings,
    folder: Path,
    log: logging.Logger,
    processes: Processes = ALONE,
    after_step: Callable[[int], None] | None = None,
) -> RunState:
    """Train the drafter, going on from what the folder holds; returns the finished run.

    head_rows: [D, H] float32, the target head's rows of the draft vocabulary. folder: of this run alone, in
    the store. after_step: called with the number of steps done, after each of them. Raises GateError where
    there is nothing to learn, or the loss is no longer a number.
    """
    lessons = Lessons.plan(train_samples, drafter.t2d.cpu(), settings, processes)
    optimiser = torch.optim.AdamW(
        drafter.parameters(), betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    state = read_run(folder, drafter, optimiser)
    # The first weights were fitted by the first process alone.
    processes.copy_first(parameter.data for parameter in drafter.parameters())
    state.counts = _counts(train_samples, validation_samples, lessons)
    if processes.count not in state.processes:
        state.processes = [*state.processes, processes.count]
    if state.step:
        log.info("going on after step %d of %d", state.step, len(lessons.steps))
    loop = _Loop(drafter, head_rows, lessons, optimiser, validation_samples, state, log)
    record = TrainingLog(folder, state, settings.tensorboard) if processes.first else nullcontext()
    with record as lines, prefetched(lessons.work_from(state.step)) as work:
        loop.run(folder, work, lines, after_step)
    return state


def _counts(train: StoredSamples, validation: StoredSamples, lessons: Lessons) -> dict[str, int]:
    return {
        "train_rows": len(train),
        "train_rows_without_supervision": sum(count == 0 for count in lessons.places),
        "train_candidates": sum(len(train.bare(index).candidates) for index in range(len(train))),
        "train_places": sum(lessons.places),
        "validation_rows": len(validation),
        "epochs": lessons.settings.epochs,
        "steps": len(lessons.steps),
    }


@dataclass
class _Loop:
    """A run on its way. `state` is all that changes, besides the weights and moments."""

    drafter: Drafter
    head_rows: torch.Tensor
    lessons: Lessons
    optimiser: torch.optim.Optimizer
    validation_samples: StoredSamples
    state: RunState
    log: logging.Logger

    def run(
        self,
        folder: Path,
        work: Iterator[Part],
        lines: TrainingLog | None,
        after_step: Callable[[int], None] | None,
    ) -> None:
        """All steps that are left. lines: of the process that writes; the others have none."""
        state, lessons, total = self.state, self.lessons, len(self.lessons.steps)
        left = sum(lessons.places_of(step) for step in range(state.step, total))
        progress = Progress(left, "tokens", self.log)
        for step in range(state.step, total):
            line = self._step(step, work)
            progress.advance(line["tokens"], f"step {state.step} of {total}, loss {line['loss']:.3f}")
            if lines is not None:
                lines.add_step(line)
            early = self._validate(step, lines)
            state.finished = early or state.step == total
            if lines is not None and (state.finished or state.step % lessons.settings.checkpoint_every == 0):
                lines.sync()
                save_run(folder, self.drafter, self.optimiser, state)
            if after_step is not None:
                after_step(state.step)
            if state.finished:
                break
        progress.close()

    def _step(self, step: int, work: Iterator[Part]) -> dict[str, Any]:
        """One step over this process's parts, and what the log tells of it."""
        settings, processes, parameters = self.lessons.settings, self.lessons.processes, self._parameters()
        rate = learning_rate(step, len(self.lessons.steps), settings)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        device = self.head_rows.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        figures = Figures(settings.ttt_steps, device)
        for _ in self.lessons.parts(step):
            part = next(work)
            part_loss = unrolled_loss(
                self.drafter,
                moved(part.batch, device),
                self.head_rows,
                settings,
                DTYPES[settings.dtype],
                step_totals=part.totals,
                figures=figures,
            )
            torch.autograd.backward(part_loss)
            loss += part_loss.detach()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        processes.add_up([parameter.grad for parameter in parameters if parameter.grad is not None])
        processes.add_up([loss, figures.sums])
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        self._check_finite("loss", float(loss), step + 1)
        self._check_finite("norm of the gradient", float(norm), step + 1)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.state.losses.append(float(loss))
        self.state.step = step + 1
        return {
            "step": step + 1,
            "epoch": self.lessons.steps[step][0],
            "loss": float(loss),
            **_by_step(figures.sums),
            "learning_rate": rate,
            "gradient_norm": float(norm),
            "tokens": self.lessons.places_of(step),
        }

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(self.drafter.parameters())

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise GateError(
                f"the {what} is {value} at step {step}; expected a number\n"
                "  change: a lower training.learning_rate or training.clip_norm"
            )

    def _validate(self, step: int, lines: TrainingLog | None) -> bool:
        """Validate where it is time to; returns whether training.early_stop ends the run here."""
        settings, ends = self.lessons.settings, self.lessons.ends_epoch(step)
        due = settings.validate_every is not None and (step + 1) % settings.validate_every == 0
        if not (ends or due) or not self.validation_samples:
            return False
        point = None
        if lines is not None:
            figures = validate(self.drafter, self.validation_samples, settings.ttt_steps)
            point = {"step": self.state.step, "epoch": self.lessons.steps[step][0], **figures}
            lines.add_validation(point)
        point = self.lessons.processes.agree(point)
        assert point is not None
        self.state.add_validation(point, self.drafter)
        self.log.info(_in_words(point))
        return ends and self.state.ends_early(settings)


def _by_step(figures: torch.Tensor) -> dict[str, list[float | None]]:
    """Mean cross-entropy and share of right guesses, unrolled step by step; None for a step without a place.

    figures: [steps, 3], sums of cross-entropies, right guesses and places.
    """
    rows = figures.tolist()
    return {
        name: [round(row[column] / row[2], 6) if row[2] else None for row in rows]
        for name, column in (("loss_by_step", 0), ("right_by_step", 1))
    }


def _in_words(point: dict[str, Any]) -> str:
    length = point["acceptance_length"]
    shares = " ".join("-" if share is None else f"{share:.3f}" for share in point["teacher_forced"])
    return (
        f"epoch {point['epoch']}, step {point['step']}: validation acceptance length "
        f"{'unknown' if length is None else f'{length:.3f}'}, right when teacher-forced {shares}"
    )
