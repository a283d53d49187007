"""Train the drafter and write its checkpoint.

Inputs: the datasets' tokenized rows, their manifests of hidden states, the draft vocabulary and the target's
folder (its embedding, head and last layer are read). Outputs: model.safetensors and config.json in the
layout that vLLM and SGLang load, and training.json with the settings, the loss curve and the validation
figures; and where it is asked for training.jsonl, a line for each step.

The run lives in the store under a key of all that determines it: stopped at any point, it goes on from its
last saved step and ends with the same bytes; finished, it is only written out again.

`torchrun --nproc-per-node N scripts/train_drafter.py ...` trains with N processes, one a device; the first of
them writes. The result is the same but for the last digits of the sums.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from eyrie.config import ConfigError, DrafterSettings, TrainingSettings, parse_settings
from eyrie.console import run_command, start_log
from eyrie.eagle3.checkpoint import save_checkpoint
from eyrie.eagle3.group_share import rows_of_share
from eyrie.eagle3.initialise import drafter_config, initialise_from_target, initialise_randomly
from eyrie.eagle3.least_squares import initialise_by_least_squares
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.processes import Processes, choose_device, joined
from eyrie.eagle3.run_state import STATE_FILE, RunState, held, keep_weights, read_run
from eyrie.eagle3.samples import (
    Captures,
    CheckedStates,
    Row,
    StoredSamples,
    check_draft_vocabulary,
    find_choices,
    read_captures,
    read_rows,
)
from eyrie.eagle3.trainer import train
from eyrie.eagle3.training_log import LOG_FILE, check_tensorboard, rewind, write_log
from eyrie.eagle3.vocabulary import read_vocabulary
from eyrie.eagle3.warm_start import start_from
from eyrie.provenance import manifest_header
from eyrie.records import content_key, read_json, sha256_file
from eyrie.stopping import end_with_snakemake
from eyrie.store import StateStore
from eyrie.target import read_text_config
from eyrie.target_weights import TargetWeights


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenized", type=Path, nargs="+", required=True, help="tokenized_data.jsonl files")
    parser.add_argument("--manifests", type=Path, nargs="+", required=True, help="manifest.json files")
    parser.add_argument("--vocabulary", type=Path, required=True, help="vocabulary.json")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target's weights")
    parser.add_argument(
        "--recipe",
        required=True,
        help='JSON: {"version", "drafter", "training"}; with "group_share": "1/8" so many of the training '
        "groups alone",
    )
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--aside", default="{}", help="JSON: training settings that change no result")
    parser.add_argument("--warm-start", type=Path, help="folder of a checkpoint to start from")
    parser.add_argument("--out-dir", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--training-log", type=Path, help="training.jsonl: a line for each step")
    parser.add_argument("--rates", action="store_true", help="tell tokens per second there")
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
    if training.warm_start is not None:
        start_from(training.warm_start, drafter)
    elif training.initialise != "random":
        initialise_from_target(
            drafter, weights, text_config.num_hidden_layers, text_config.tie_word_embeddings
        )
    return drafter


def _fits_first_weights(settings: TrainingSettings) -> bool:
    return settings.initialise == "least_squares" and settings.warm_start is None


def _train(
    drafter: Drafter,
    rows: list[Row],
    states: StateStore,
    captures: Captures,
    head: torch.Tensor,
    settings: TrainingSettings,
    folder: Path,
    device: torch.device,
    processes: Processes,
    log: logging.Logger,
) -> RunState:
    """Train on from what the folder holds; a run that begins may fit its first weights to the samples."""
    checked = CheckedStates(rows, states, captures)
    choices = find_choices(rows, checked, head.to(device), settings.mask_shift, processes, log)
    shares = {}
    for share in ("train", "validation"):
        members = [index for index, row in enumerate(rows) if row.split == share]
        shares[share] = StoredSamples(
            [rows[index] for index in members],
            [choices[index] for index in members],
            checked,
            settings.mask_shift,
        )
    head_rows = head[drafter.draft_token_ids()].float()
    begins = processes.first and not (folder / STATE_FILE).exists()
    if begins and _fits_first_weights(settings):
        start = time.monotonic()
        learnt = shares["train"]
        initialise_by_least_squares(drafter, learnt, head_rows, settings.seed, learnt.lengths())
        log.info("fitted the first weights by least squares in %.0f s", time.monotonic() - start)
    return train(
        drafter.to(device),
        head_rows.to(device),
        shares["train"],
        shares["validation"],
        settings,
        folder,
        log,
        processes,
    )


def _run_key(
    recipe: Mapping[str, Any],
    captures: Captures,
    token_ids: list[int],
    rows: list[Row],
    kind: str,
    warm: Path | None,
) -> str:
    """The key of all that determines a run; which of its weights become the checkpoint is no part of that."""
    training = {name: value for name, value in recipe["training"].items() if name != "keep"}
    parts: list[object] = [{**recipe, "training": training}, captures.recipe, token_ids]
    parts.append([row.identity() for row in rows])
    aside = {}
    if kind != "cpu":
        aside["device"] = kind
    if warm is not None:
        aside["warm_start"] = sha256_file(warm / "model.safetensors")
    return content_key("drafter", *parts, *([aside] if aside else []))


def _run_on(
    arguments: argparse.Namespace,
    recipe: dict[str, Any],
    training: TrainingSettings,
    device: torch.device,
    processes: Processes,
    stack: ExitStack,
    log: logging.Logger,
) -> None:
    """Train or find the run, and write the checkpoint. stack: holds the run's folder until all is done."""
    start = time.monotonic()
    settings = parse_settings(DrafterSettings, json.dumps(recipe["drafter"]))
    target = read_json(arguments.target)
    token_ids = read_vocabulary(arguments.vocabulary, target["vocab_size"])
    captures = read_captures(arguments.manifests, target)
    check_draft_vocabulary(captures, token_ids)
    states = StateStore(arguments.store, captures.recipe)
    rows = read_rows(arguments.tokenized, states, captures)
    if "group_share" in recipe:
        rows = rows_of_share(rows, Fraction(recipe["group_share"]))
    _check_fits(training, captures, rows)
    key = _run_key(recipe, captures, token_ids, rows, device.type, arguments.warm_start)
    folder = arguments.store / "drafters" / key
    if processes.first:
        stack.enter_context(held(folder))

    text_config = read_text_config(arguments.target_path)
    weights = TargetWeights(arguments.target_path, target["files"])
    drafter = _new_drafter(settings, training, token_ids, captures, target, weights, text_config)
    run = read_run(folder, drafter, None)
    if processes.agree(run.finished):
        log.info("found the finished training %s in the store; nothing to train", key)
    else:
        head = weights.head(text_config.tie_word_embeddings)
        run = _train(drafter, rows, states, captures, head, training, folder, device, processes, log)
    if not processes.first:
        return
    kept = keep_weights(drafter, run, training.keep, folder)

    parents = [*arguments.tokenized, *arguments.manifests, arguments.vocabulary, arguments.target]
    if arguments.warm_start is not None:
        parents += [arguments.warm_start / name for name in ("config.json", "model.safetensors")]
    manifest = {
        **manifest_header("drafter", recipe, parents, ["torch", "safetensors"]),
        "key": key,
        "counts": run.counts,
        "train_groups": len({(row.dataset, row.group) for row in rows if row.split == "train"}),
        "loss": run.loss_curve(),
        "validation": run.validation,
        **_beyond_the_usual(run, kept, device),
    }
    save_checkpoint(arguments.out_dir, drafter, manifest)
    if arguments.training_log is not None:
        rewind(folder / LOG_FILE, run)
        write_log(folder, arguments.training_log, rates=arguments.rates)
    log.info(
        "wrote %s after %d steps over %d rows (%d supervised positions), %.0f s",
        arguments.out_dir,
        run.step,
        run.counts["train_rows"],
        run.counts["train_places"],
        time.monotonic() - start,
    )


def _check_fits(training: TrainingSettings, captures: Captures, rows: list[Row]) -> None:
    """What is wanted of the samples must be in them. Raises ConfigError."""
    if _fits_first_weights(training) and captures.recipe.get("top_tokens") is not None:
        raise ConfigError(
            "training.initialise: least_squares fits the first weights to the target's last states, but with "
            "hidden_states.top_tokens they are not stored. Set training.initialise: target_layer, or "
            "hidden_states.top_tokens: null"
        )
    wants = training.keep == "best" or training.early_stop is not None
    if wants and not any(row.split == "validation" for row in rows):
        raise ConfigError(
            "training.keep: best and training.early_stop go by the validation rows, but there is none. Set "
            "split.validation higher, or training.keep: last and training.early_stop: null"
        )


def _beyond_the_usual(run: RunState, kept: dict[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """What the manifest tells of a run that was not made by one process on a CPU in all its steps."""
    told: dict[str, Any] = {}
    if run.processes not in ([], [1]):
        told["processes"] = run.processes
    if device.type != "cpu":
        told["device"] = device.type
    if run.step < run.counts["steps"]:
        told["stopped_after"] = run.step
    if kept is not None:
        told["kept"] = kept
    return told


def _training_settings(arguments: argparse.Namespace, recipe: Mapping[str, Any]) -> TrainingSettings:
    settings = {**recipe, **json.loads(arguments.aside)}
    if arguments.warm_start is not None:
        settings["warm_start"] = str(arguments.warm_start)
    return parse_settings(TrainingSettings, json.dumps(settings))


def main() -> None:
    """Check the inputs, train or find the finished run, write the checkpoint."""
    end_with_snakemake()
    arguments = _arguments()
    rank = int(os.environ.get("RANK", "0"))
    log = start_log(
        "train_drafter" if rank == 0 else f"train_drafter {rank}", arguments.log if rank == 0 else None
    )
    recipe = json.loads(arguments.recipe)
    training = _training_settings(arguments, recipe["training"])
    # How often a run is saved changes no result, so it belongs neither into the key nor into the manifest.
    recipe["training"].pop("checkpoint_every", None)
    if rank != 0:
        # The first process tells how far all are.
        log.setLevel(logging.WARNING)
    if training.tensorboard:
        check_tensorboard()
    torch.set_num_threads(training.threads)
    device = choose_device(training.device)
    with joined(device) as processes, ExitStack() as stack:
        _run_on(arguments, recipe, training, device, processes, stack, log)


if __name__ == "__main__":
    run_command(main)
