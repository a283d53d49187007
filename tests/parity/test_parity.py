"""Ours, speculators 0.9.0 and the paper's plain loop: the same logits, losses and gradients from one
sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyrie.config import TrainingSettings
from eyrie.eagle3.batches import Sample, make_batch
from eyrie.eagle3.checkpoint import load_drafter, save_checkpoint
from eyrie.eagle3.loss import target_distribution, unrolled_loss
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.unroll import unroll
from parity.oracle import PYTHON, WORKER, Target, Worker, make_sample, write_case
from plain_eagle3 import PlainStep, plain_steps
from tiny_eagle3 import HIDDEN, LAYER_IDS, VOCABULARY, random_drafter

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not PYTHON.exists(), reason="speculators' environment is not set up: make oracle-env"),
]

STEPS, DECAY = 4, 0.7
# Each starts with tokens that are not supervised: speculators lets the last positions of a packed document
# take their later steps' tokens and targets from the next document.
MASKS = [[0] * 9 + [1] * 14, [0] * 6 + [1] * 5 + [0] * 4 + [1] * 6 + [0] * 2, [0] * 5 + [1] * 8]
THEIRS = TrainingSettings(step_decay=DECAY, mask_shift="shifted", position_mask=False)


class Made:
    """One case, as both trainers have it."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(5)
        self.drafter = random_drafter(3, draft_vocabulary=60)
        self.target = Target(
            self.drafter.embedding,
            torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.3,
            1 + 0.1 * torch.randn(HIDDEN, generator=generator),
        )
        eps = self.drafter.config.rms_norm_eps
        pairs = [make_sample(self.target, generator, mask, len(LAYER_IDS), eps) for mask in MASKS]
        self.samples = [sample for sample, _ in pairs]
        self.folder = folder
        write_case(folder, self.drafter, self.target, pairs, STEPS, DECAY)

    def plain(self, sample: Sample, drafter: Drafter | None = None) -> list[PlainStep]:
        """The paper's loop over a sample, under speculators' convention of what is supervised."""
        return plain_steps(drafter or self.drafter, sample, self.target.head, STEPS, "shifted", False)

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients of every weight."""
        self.drafter.zero_grad()
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in self.drafter.named_parameters()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def speculators(made: Made) -> Iterator[Worker]:
    with Worker([PYTHON, WORKER], threads=1) as worker:
        worker.ask(do="load", folder=str(made.folder), attention="eager", dtype="float32")
        yield worker


@pytest.fixture(scope="module")
def compared(made: Made, speculators: Worker) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """speculators' losses, and its logits and gradients."""
    out = made.folder / "theirs.safetensors"
    return speculators.ask(do="compare", out=str(out)), load_file(out)


def valid_logits(theirs: dict[str, torch.Tensor], step: int) -> list[torch.Tensor]:
    """Sample by sample, the logits of positions whose tokens at the step are the sample's own."""
    counts = [len(mask) - 1 for mask in MASKS]
    parts = theirs[f"logits.{step}"].split(counts)
    return [part[: count - step] for part, count in zip(parts, counts, strict=True)]


def test_logits_of_every_step_agree(made: Made, compared: tuple[dict[str, Any], dict[str, Any]]) -> None:
    batch = make_batch(made.samples, [sample.candidates for sample in made.samples], STEPS)
    with torch.no_grad():
        states = unroll(made.drafter, batch.layout)
        plain = [made.plain(sample) for sample in made.samples]
        seen = 0
        for step in range(STEPS):
            ours = made.drafter.draft_logits(states[step]).split(batch.layout.query_counts)
            positions = batch.layout.query_positions.split(batch.layout.query_counts)
            for index, theirs in enumerate(valid_logits(compared[1], step)):
                full = plain[index][step].logits[: len(theirs)]
                torch.testing.assert_close(theirs, full, rtol=1e-5, atol=1e-5)
                inside = positions[index] < len(theirs)
                torch.testing.assert_close(
                    ours[index][inside], full[positions[index][inside]], rtol=1e-5, atol=1e-5
                )
                seen += int(inside.sum())
    assert seen > 100


def entropy(made: Made, step: int) -> torch.Tensor:
    """The target's mean entropy over the step's places: what cross-entropy has more than divergence."""
    total, count = torch.zeros(()), 0
    for sample in made.samples:
        assert sample.last is not None
        places = sample.candidates[sample.candidates > step]
        target = target_distribution(sample.last[places], made.target.head[made.drafter.t2d], torch.float32)
        total, count = total - torch.xlogy(target, target).sum(), count + len(places)
    return total / count


def test_losses_agree_step_by_step_but_for_the_targets_entropy(
    made: Made, compared: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    every = [made.plain(sample) for sample in made.samples]
    sums = []
    for step, parts in enumerate(zip(*every, strict=True)):
        mean = sum((part.entropy * part.weight).sum() for part in parts) / sum(
            part.weight.sum() for part in parts
        )
        ours = (DECAY**step * (mean - entropy(made, step))).item()
        assert ours == pytest.approx(compared[0]["steps"][step], abs=1e-5), step
        sums.append((DECAY**step * mean).item())
    batch = make_batch(made.samples, [sample.candidates for sample in made.samples], STEPS)
    loss = unrolled_loss(made.drafter, batch, made.target.head[made.drafter.t2d], THEIRS, torch.float32)
    assert loss.item() == pytest.approx(sum(sums), abs=1e-5)


def test_gradients_agree_where_both_train(
    made: Made, compared: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    batch = make_batch(made.samples, [sample.candidates for sample in made.samples], STEPS)
    ours = made.gradients(
        unrolled_loss(made.drafter, batch, made.target.head[made.drafter.t2d], THEIRS, torch.float32)
    )
    theirs = {name[9:]: t for name, t in compared[1].items() if name.startswith("gradient.")}
    # Their head is frozen.
    assert theirs.keys() == ours.keys() - {"lm_head.weight"}
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def plain_logits(made: Made, drafter: Drafter) -> list[torch.Tensor]:
    """Step by step, the plain loop's logits over all samples where they are valid."""
    with torch.no_grad():
        every = [made.plain(sample, drafter) for sample in made.samples]
    return [
        torch.cat(
            [steps[step].logits[: len(mask) - 1 - step] for steps, mask in zip(every, MASKS, strict=True)]
        )
        for step in range(STEPS)
    ]


def test_a_drafter_that_speculators_saved_loads_here(
    made: Made, speculators: Worker, compared: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    speculators.ask(do="save", folder=str(tmp_path))
    loaded = load_drafter(tmp_path, made.target.embedding, torch.float32)
    assert loaded.config.layer_ids == made.drafter.config.layer_ids
    for step, ours in enumerate(plain_logits(made, loaded)):
        torch.testing.assert_close(ours, torch.cat(valid_logits(compared[1], step)), rtol=1e-5, atol=1e-5)


def test_our_drafter_loads_there(made: Made, speculators: Worker, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ours", made.drafter, {})
    told = speculators.ask(do="put", file=str(tmp_path / "ours/model.safetensors"))
    assert told["unexpected"] == []
    # The target's own, which our checkpoint leaves to the target.
    assert told["missing"] == ["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]
    speculators.ask(do="compare", out=str(tmp_path / "put.safetensors"))
    theirs = load_file(tmp_path / "put.safetensors")
    loaded = load_drafter(tmp_path / "ours", made.target.embedding, torch.float32)
    for step, ours in enumerate(plain_logits(made, loaded)):
        torch.testing.assert_close(ours, torch.cat(valid_logits(theirs, step)), rtol=1e-5, atol=1e-5)
    speculators.ask(do="load", folder=str(made.folder), attention="eager", dtype="float32")
