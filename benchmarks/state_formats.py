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
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from eyrie.config import Config, TrainingSettings, parse_config
from eyrie.console import start_log
from eyrie.eagle3.initialise import (
    drafter_config,
    initialise_from_target,
    initialise_randomly,
)
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.processes import ALONE
from eyrie.eagle3.samples import CheckedStates, Row, StoredSamples, find_choices, read_captures, read_rows
from eyrie.eagle3.trainer import train
from eyrie.eagle3.validation import walk
from eyrie.eagle3.vocabulary import read_vocabulary
from eyrie.encoding import decode, encode
from eyrie.records import read_json
from eyrie.store import States, StateStore
from eyrie.target import read_text_config
from eyrie.target_weights import TargetWeights
from eyrie.top_tokens import Likeliest

DRAFT_TOKENS = 3


@dataclass
class Built:
    """A finished build: its configuration, target, rows and their states."""

    config: Config
    target: dict[str, Any]
    weights: TargetWeights
    text_config: Any
    token_ids: list[int]
    layer_ids: list[int]
    rows: list[Row]
    states: CheckedStates
    choices: list[torch.Tensor]

    @classmethod
    def read(cls, work: Path, log: logging.Logger) -> Built:
        """Read it from its folder, beside which the configuration and the target lie."""
        config = parse_config(yaml.safe_load((work.parent / "config.yaml").read_text(encoding="utf-8")))
        folder, path = work / config.target.name, work.parent / config.target.path
        target = read_json(folder / "target.json")
        captures = read_captures(sorted(folder.glob("hidden_states/*/manifest.json")), target)
        store = StateStore(work / "store", captures.recipe)
        tokenized = sorted(folder.glob("tokenized/*/tokenized_data.jsonl"))
        rows = read_rows(tokenized, store, captures, ("train", "validation", "held_out"))
        states = CheckedStates(rows, store, captures)
        weights, text_config = TargetWeights(path, target["files"]), read_text_config(path)
        head, shift = weights.head(text_config.tie_word_embeddings), config.training.mask_shift
        return cls(
            config=config,
            target=target,
            weights=weights,
            text_config=text_config,
            token_ids=read_vocabulary(folder / "drafter/vocabulary.json", target["vocab_size"]),
            layer_ids=captures.layer_ids,
            rows=rows,
            states=states,
            choices=find_choices(rows, states, head, shift, ALONE, log),
        )

    @property
    def head(self) -> torch.Tensor:
        """The target's head [V, H]."""
        return self.weights.head(self.text_config.tie_word_embeddings)

    def samples(self, split: str, states: Any) -> StoredSamples:
        """The rows of a split as samples."""
        members = [index for index, row in enumerate(self.rows) if row.split == split]
        chosen = [self.rows[index] for index in members], [self.choices[index] for index in members]
        return StoredSamples(*chosen, states, self.config.training.mask_shift)

    def drafter(self, seed: int) -> Drafter:
        """A drafter with the first weights of a seed."""
        config = drafter_config(self.config.drafter, self.text_config, self.layer_ids, self.target["eos_ids"])
        drafter = Drafter(config, self.token_ids, self.weights.embedding())
        initialise_randomly(drafter, seed)
        text = self.text_config
        initialise_from_target(drafter, self.weights, text.num_hidden_layers, text.tie_word_embeddings)
        return drafter


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
    with tempfile.TemporaryDirectory() as folder:
        train(
            drafter,
            built.head[drafter.draft_token_ids()].float(),
            built.samples("train", states),
            built.samples("validation", built.states),
            settings,
            Path(folder),
            log,
        )
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
