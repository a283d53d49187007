"""What a drafter loses by learning from smaller hidden states: held-out acceptance length by way of storing.

Takes a finished default build and trains its drafter again, seed by seed, from the states as they are stored
(bfloat16 layers and the last state) and from the same states as float8 layers and top tokens, through the
store's own encoding and decoding. Everything else is the same. First weights are the target's last layer for
both, since least squares need the last state. Judged by the walk over all held-out answers with the states as
the target gives them, which is what an engine feeds the drafter; that is replayed, not decoded anew.

    make && python benchmarks/state_formats.py [--work work] [--seeds 3] [--top-tokens 128] [--epochs 3]

A build's training takes minutes, and this trains twice for each seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# Also puts scripts/ on the path.
from finished_build import DRAFT_TOKENS, Built

from eyrie.config import TrainingSettings
from eyrie.console import start_log
from eyrie.eagle3.samples import CheckedStates, Row
from eyrie.eagle3.validation import walk
from eyrie.encoding import decode, encode
from eyrie.store import States
from eyrie.top_tokens import Likeliest


class Smaller:
    """States as they come back from a store of float8 layers and top tokens."""

    def __init__(self, states: CheckedStates, layers: int, likeliest: Likeliest) -> None:
        self._states, self._layers, self._likeliest = states, layers, likeliest
        self._known: dict[str, States] = {}

    def load(self, rows: Sequence[Row]) -> list[States]:
        """The rows' states, each made smaller once."""
        for row in rows:
            if row.key not in self._known:
                (states,) = self._states.load([row])
                assert states.last is not None
                packed = encode(states, "float8", self._layers).with_top(self._likeliest.of(states.last))
                self._known[row.key] = decode(packed)
        return [self._known[row.key] for row in rows]


def held_out_length(built: Built, states: Any, settings: TrainingSettings, log: logging.Logger) -> float:
    """Train a drafter from these states; its acceptance length over the held-out answers."""
    drafter = built.drafter(settings.seed)
    built.train(drafter, states, settings, log)
    walked = walk(drafter, built.samples("held_out", built.states), DRAFT_TOKENS)
    log.info("seed %d: %s", settings.seed, walked)
    return float(walked["acceptance_length"])


def main() -> None:
    """Train, walk, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder of a finished build")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--top-tokens", type=int, default=128)
    parser.add_argument("--epochs", type=int, help="instead of the configuration's")
    arguments = parser.parse_args()
    log = start_log("state_formats", None)
    built = Built.read(arguments.work.resolve(), log)
    torch.set_num_threads(built.config.training.threads)
    changes = {"initialise": "target_layer"} | ({"epochs": arguments.epochs} if arguments.epochs else {})
    smaller = Smaller(
        built.states,
        len(built.layer_ids),
        Likeliest(lambda: built.head, built.token_ids, arguments.top_tokens),
    )
    formats = {"bfloat16, last state": built.states, f"float8, top {arguments.top_tokens}": smaller}
    lengths: dict[str, list[float]] = {name: [] for name in formats}
    for seed in range(arguments.seeds):
        settings = built.config.training.model_copy(update={**changes, "seed": seed})
        for name, states in formats.items():
            lengths[name].append(held_out_length(built, states, settings, log))
    first, second = lengths.values()
    ratio = statistics.mean(second) / statistics.mean(first)
    print(f"{'held-out acceptance length':28}" + "".join(f"  seed {seed}" for seed in range(arguments.seeds)))
    for name, figures in lengths.items():
        print(f"{name:28}" + "".join(f"{figure:8.4f}" for figure in figures))
    print(f"smaller over larger, mean of the seeds: {ratio:.4f}")
    print(
        json.dumps(
            {
                "benchmark": "state_formats",
                "acceptance_length": lengths,
                "ratio": ratio,
                "epochs": settings.epochs,
                "top_tokens": arguments.top_tokens,
            }
        )
    )


if __name__ == "__main__":
    main()
