"""A finished build as the benchmarks that train anew on its states take it."""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from eyrie.config import Config, TrainingSettings, parse_config
from eyrie.eagle3.initialise import (
    drafter_config,
    initialise_from_target,
    initialise_randomly,
)
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.processes import ALONE
from eyrie.eagle3.samples import CheckedStates, Row, StoredSamples, find_choices, read_captures, read_rows
from eyrie.eagle3.trainer import train
from eyrie.eagle3.vocabulary import read_vocabulary
from eyrie.records import read_json
from eyrie.store import StateStore
from eyrie.target import read_text_config
from eyrie.target_weights import TargetWeights

ROOT = Path(__file__).resolve().parent.parent
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

    def train(self, drafter: Drafter, states: Any, settings: TrainingSettings, log: logging.Logger) -> None:
        """Train a drafter from these states of the training rows, in a folder that is gone afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            train(
                drafter,
                self.head[drafter.draft_token_ids()].float(),
                self.samples("train", states),
                self.samples("validation", self.states),
                settings,
                Path(folder),
                log,
            )

    def drafter(self, seed: int) -> Drafter:
        """A drafter with the first weights of a seed."""
        config = drafter_config(self.config.drafter, self.text_config, self.layer_ids, self.target["eos_ids"])
        drafter = Drafter(config, self.token_ids, self.weights.embedding())
        initialise_randomly(drafter, seed)
        text = self.text_config
        initialise_from_target(drafter, self.weights, text.num_hidden_layers, text.tie_word_embeddings)
        return drafter
