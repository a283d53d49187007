"""Train the drafter and write its checkpoint.

Inputs: the datasets' tokenized rows, their manifests of hidden states, the draft vocabulary and the target's
folder (its embedding, head and last layer are read). Outputs: model.safetensors and config.json in the
layout that vLLM and SGLang load, README.md, and training.json with the settings, the loss curve and the
validation figures.

The run lives in the store under a key of all that determines it: stopped at any point, it goes on from its
last saved step and ends with the same bytes; finished, it is only written out again.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyrie.config import ConfigError, DrafterSettings, TrainingSettings, parse_settings
from eyrie.console import run_command, start_log
from eyrie.eagle3.checkpoint import model_card, save_checkpoint
from eyrie.eagle3.initialise import (
    TargetWeights,
    drafter_config,
    initialise_from_target,
    initialise_randomly,
)
from eyrie.eagle3.least_squares import initialise_by_least_squares
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.samples import (
    Captures,
    Row,
    check_draft_vocabulary,
    load_samples,
    read_captures,
    read_rows,
)
from eyrie.eagle3.trainer import RunState, read_run, train
from eyrie.eagle3.vocabulary import read_vocabulary
from eyrie.provenance import manifest_header
from eyrie.records import content_key, read_json
from eyrie.store import StateStore
from eyrie.target import read_text_config


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenized", type=Path, nargs="+", required=True, help="tokenized_data.jsonl files")
    parser.add_argument("--manifests", type=Path, nargs="+", required=True, help="manifest.json files")
    parser.add_argument("--vocabulary", type=Path, required=True, help="vocabulary.json")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target's weights")
    parser.add_argument("--recipe", required=True, help='JSON: {"version", "drafter", "training"}')
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--checkpoint-every", type=int, help="steps between saves; changes no result")
    parser.add_argument("--out-dir", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--log", type=Path, help="log file")
    return parser.parse_args()


def _new_drafter(
    settings: DrafterSettings,
    training: TrainingSettings,
    token_ids: list[int],
    captures: Captures,
    target: Mapping[str, Any],
    weights: TargetWeights,
    text_config: Any,
) -> Drafter:
    if settings.draft_vocab_size != len(token_ids):
        raise ConfigError(
            f"drafter.draft_vocab_size: saw {settings.draft_vocab_size}, but the vocabulary holds "
            f"{len(token_ids)} tokens; build it anew"
        )
    config = drafter_config(settings, text_config, captures.layer_ids, target["eos_ids"])
    drafter = Drafter(config, token_ids, weights.embedding())
    initialise_randomly(drafter, training.seed)
    if training.initialise != "random":
        initialise_from_target(
            drafter, weights, text_config.num_hidden_layers, text_config.tie_word_embeddings
        )
    return drafter


def _train(
    drafter: Drafter,
    rows: list[Row],
    states: StateStore,
    captures: Captures,
    head: torch.Tensor,
    settings: TrainingSettings,
    folder: Path,
    begins: bool,
    log: logging.Logger,
) -> RunState:
    """Train on from what the folder holds; a run that begins may fit its first weights to the samples."""
    samples = load_samples(rows, states, captures, head, settings.mask_shift, log)
    shares = {
        share: [sample for row, sample in zip(rows, samples, strict=True) if row.split == share]
        for share in ("train", "validation")
    }
    head_rows = head[drafter.draft_token_ids()].float()
    if begins and settings.initialise == "least_squares":
        start = time.monotonic()
        initialise_by_least_squares(drafter, shares["train"], head_rows, settings.seed)
        log.info("fitted the first weights by least squares in %.0f s", time.monotonic() - start)
    return train(drafter, head_rows, shares["train"], shares["validation"], settings, folder, log)


def main() -> None:
    """Check the inputs, train or find the finished run, write the checkpoint."""
    arguments = _arguments()
    log = start_log("train_drafter", arguments.log)
    start = time.monotonic()
    recipe = json.loads(arguments.recipe)
    if arguments.checkpoint_every is not None:
        recipe["training"]["checkpoint_every"] = arguments.checkpoint_every
    settings = parse_settings(DrafterSettings, json.dumps(recipe["drafter"]))
    training = parse_settings(TrainingSettings, json.dumps(recipe["training"]))
    # How often a run is saved changes no result, so it belongs neither into the key nor into the manifest.
    recipe["training"].pop("checkpoint_every", None)
    torch.set_num_threads(training.threads)

    target = read_json(arguments.target)
    token_ids = read_vocabulary(arguments.vocabulary, target["vocab_size"])
    captures = read_captures(arguments.manifests, target)
    check_draft_vocabulary(captures, token_ids)
    states = StateStore(arguments.store, captures.recipe)
    rows = read_rows(arguments.tokenized, states, captures)
    key = content_key("drafter", recipe, captures.recipe, token_ids, [row.identity() for row in rows])
    folder = arguments.store / "drafters" / key

    text_config = read_text_config(arguments.target_path)
    weights = TargetWeights(arguments.target_path, target["files"])
    drafter = _new_drafter(settings, training, token_ids, captures, target, weights, text_config)
    run = read_run(folder, drafter, None)
    if run.finished:
        log.info("found the finished training %s in the store; nothing to train", key)
    else:
        head = weights.head(text_config.tie_word_embeddings)
        run = _train(drafter, rows, states, captures, head, training, folder, run.step == 0, log)

    parents = [*arguments.tokenized, *arguments.manifests, arguments.vocabulary, arguments.target]
    manifest = {
        **manifest_header("drafter", recipe, parents, ["torch", "safetensors"]),
        "key": key,
        "counts": run.counts,
        "loss": run.loss_curve(),
        "validation": run.validation,
    }
    card = model_card(target, text_config.model_type, manifest, drafter.config)
    save_checkpoint(arguments.out_dir, drafter, card, manifest)
    log.info(
        "wrote %s after %d steps over %d rows (%d supervised positions), %.0f s",
        arguments.out_dir,
        run.step,
        run.counts["train_rows"],
        run.counts["train_places"],
        time.monotonic() - start,
    )


if __name__ == "__main__":
    run_command(main)
