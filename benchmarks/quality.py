"""How good a drafter is beside one that speculators 0.9.0 trains on the same states for the same wall time.

Takes a finished default build. Ours is trained as the configuration says, first weights included; then
speculators' model trains in its own environment (`make oracle-env`) for the seconds that ours took, from its
own first weights, on the same samples and vocabulary, with as many supervised tokens a step, AdamW, and the
same warm-up and cosine; its frozen head and its loss are its own. Both drafters are judged by the walk over
all held-out answers, replayed with the target's states.

    make && make oracle-env && python benchmarks/quality.py [--work work] [--rates 6e-4 2e-3] [--epochs 3]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path

import torch
from finished_build import DRAFT_TOKENS, ROOT, Built

from eyrie.config import TrainingSettings
from eyrie.console import start_log
from eyrie.eagle3.batches import Sample
from eyrie.eagle3.checkpoint import load_drafter
from eyrie.eagle3.least_squares import initialise_by_least_squares
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.validation import walk
from parity.oracle import PYTHON, WORKER, Target, Worker, write_case


def ours(built: Built, settings: TrainingSettings, log: logging.Logger) -> tuple[Drafter, float]:
    """A drafter trained as the configuration says, and the seconds that took."""
    drafter = built.drafter(settings.seed)
    start = time.monotonic()
    if settings.initialise == "least_squares":
        learnt = built.samples("train", built.states)
        head_rows = built.head[drafter.draft_token_ids()].float()
        initialise_by_least_squares(drafter, learnt, head_rows, settings.seed, learnt.lengths())
    built.train(drafter, built.states, settings, log)
    return drafter, time.monotonic() - start


def write_samples(built: Built, folder: Path) -> None:
    """The training samples as a case for speculators, which norms the last states itself."""
    norm = built.weights.final_norm().float()
    target = Target(built.weights.embedding().float(), built.head.float(), norm)
    learnt = built.samples("train", built.states)

    def pair(sample: Sample) -> tuple[Sample, torch.Tensor]:
        assert sample.last is not None
        sample.aux = sample.aux.float()
        return sample, sample.last.float() / norm

    pairs = [pair(sample) for sample in learnt.load(range(len(learnt)))]
    settings = built.config.training
    write_case(folder, built.drafter(0), target, pairs, settings.ttt_steps, settings.step_decay)


def theirs(
    built: Built, case: Path, settings: TrainingSettings, rate: float, seconds: float, folder: Path
) -> tuple[Drafter, dict[str, float]]:
    """A drafter that speculators trained for so long, and what it tells of that."""
    with Worker([PYTHON, WORKER], settings.threads) as worker:
        worker.ask(do="load", folder=str(case), attention="sdpa", dtype="float32", first_weights="own")
        told = worker.ask(
            do="train",
            seconds=seconds,
            supervised=settings.tokens_per_step,
            peak=rate,
            warmup=settings.warmup_steps,
            seed=settings.seed,
        )
        worker.ask(do="save", folder=str(folder))
    return load_drafter(folder, built.weights.embedding(), torch.float32), told


def main() -> None:
    """Train both, walk, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "work", help="folder of a finished build")
    parser.add_argument("--rates", type=float, nargs="+", help="speculators' peak learning rates; ours else")
    parser.add_argument("--epochs", type=int, help="ours, instead of the configuration's")
    arguments = parser.parse_args()
    log = start_log("quality", None)
    built = Built.read(arguments.work.resolve(), log)
    changes = {"epochs": arguments.epochs} if arguments.epochs else {}
    settings = built.config.training.model_copy(update=changes)
    torch.set_num_threads(settings.threads)
    held_out = built.samples("held_out", built.states)

    drafter, seconds = ours(built, settings, log)
    length = float(walk(drafter, held_out, DRAFT_TOKENS)["acceptance_length"])
    others = []
    with tempfile.TemporaryDirectory() as name:
        write_samples(built, Path(name) / "case")
        for rate in arguments.rates or [settings.learning_rate]:
            folder = Path(name) / f"rate-{rate:g}"
            drafter, told = theirs(built, Path(name) / "case", settings, rate, seconds, folder)
            told |= {
                "rate": rate,
                "length": float(walk(drafter, held_out, DRAFT_TOKENS)["acceptance_length"]),
            }
            log.info("speculators: %s", told)
            others.append(told)
    best = max(other["length"] for other in others)
    print(f"{'held-out acceptance length':34}{length:8.3f}  eyrie, {settings.epochs} epochs, {seconds:.0f} s")
    for other in others:
        how = f"speculators, peak rate {other['rate']:g}, {other['epochs']} epochs"
        print(f"{'':34}{other['length']:8.3f}  {how}")
    print(f"ours over the best of theirs: {length / best:.3f}")
    print(
        json.dumps(
            {
                "benchmark": "quality",
                "seconds": seconds,
                "acceptance_length": length,
                "speculators": others,
                "ratio": length / best,
            }
        )
    )


if __name__ == "__main__":
    main()
