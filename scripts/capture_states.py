"""Capture the target's hidden states over a dataset's samples, and name them in a manifest.

Inputs: tokenized_data.jsonl, target.json and the target's folder. Output: manifest.json, with every sample's
key and digest. The states lie in the store; those that the answering pass left there are not made again, and
the model is loaded only when some are missing.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eyrie.config import EngineSettings, HiddenStatesSettings, Settings, parse_settings
from eyrie.console import Progress, run_command, start_log
from eyrie.gates import GateError
from eyrie.provenance import manifest_header
from eyrie.records import read_json, read_jsonl, write_json
from eyrie.states import states_recipe
from eyrie.store import StateRef, States, StateStore, StoreError

if TYPE_CHECKING:
    from eyrie.target import Target

# Share of a greedy answer's tokens that the captured states must predict. Not all: states are stored with
# fewer digits than they were computed with, and near ties happen.
_AGREEMENT = 0.9


class CaptureRecipe(Settings):
    """What the states of given tokens depend on beside the target."""

    version: int
    dtype: str
    hidden_states: HiddenStatesSettings


def capture_missing(
    samples: Mapping[str, Mapping[str, Any]],
    dataset: str,
    states: StateStore,
    recipe: CaptureRecipe,
    path: Path,
    engine: EngineSettings,
    log: logging.Logger,
) -> int:
    """Capture the samples {key: row} that the store has no states of; returns how many."""
    if len(states.find(samples)) == len(samples):
        return 0
    # The target's library takes seconds to load, and most runs find everything in the store.
    from eyrie.engines.in_process import InProcessEngine  # noqa: PLC0415
    from eyrie.target import Target  # noqa: PLC0415

    with states.writer(dataset) as writer:
        found = states.find(samples)
        missing = [row["input_ids"] for key, row in samples.items() if key not in found]
        target = Target(path, recipe.dtype, recipe.hidden_states.layer_ids)
        progress = Progress(sum(map(len, missing)), "tokens", log)
        checked = False
        for group in InProcessEngine(target, engine).capture(missing, recipe.hidden_states.dtype):
            if not checked:
                check_capture(target, group[0], samples[states.key(group[0].token_ids)], log)
                checked = True
            writer.add(group)
            progress.advance(sum(len(sample.token_ids) for sample in group))
        tokens, seconds = sum(map(len, missing)), progress.close()
        log.info("captured %d tokens in %.1f s, %.0f tokens/s", tokens, seconds, tokens / seconds)
    return len(missing)


def check_capture(target: Target, captured: States, row: Mapping[str, Any], log: logging.Logger) -> None:
    """Compare one sample's states with the reference and, for a greedy answer, with its tokens.

    Raises StoreError, GateError.
    """
    from eyrie.engines.in_process import check_against_reference  # noqa: PLC0415 - see above

    log.info("states differ from the reference by %.4f", check_against_reference(target, captured))
    if not row["greedy"]:
        return
    share = agreement(target, captured, row["loss_mask"])
    log.info("the states predict %.0f%% of the answer's tokens", 100 * share)
    if share < _AGREEMENT:
        raise GateError(
            f"the captured states predict {share:.0%} of the tokens of the greedy answer {row['id']}\n"
            f"  expected: at least {_AGREEMENT:.0%}\n"
            "  change: the target's folder, which must be the one that answered; then run again"
        )


def agreement(target: Target, captured: States, loss_mask: Sequence[int]) -> float:
    """The share of supervised tokens that are the likeliest ones after the state before them."""
    predicted = target.logits(captured.last.float()[:-1]).argmax(dim=-1)
    tokens = torch.tensor(captured.token_ids[1:])
    supervised = torch.tensor(loss_mask[1:], dtype=torch.bool)
    return (predicted == tokens)[supervised].float().mean().item()


def check_found(refs: Mapping[str, StateRef], samples: Mapping[str, Mapping[str, Any]]) -> None:
    """Every sample's states are there, one row a token. Raises StoreError."""
    for key, row in samples.items():
        if key not in refs or refs[key].tokens != len(row["input_ids"]):
            raise StoreError(
                f"the store has no hidden states of sample {row['id']} though they were just captured; "
                "something removes files from the store while the build runs. Stop it and run again"
            )


def main() -> None:
    """The command."""
    arguments = _arguments()
    log = start_log("capture_states", arguments.log)
    start = time.monotonic()
    recipe = parse_settings(CaptureRecipe, arguments.recipe)
    target = read_json(arguments.target)
    rows = list(read_jsonl(arguments.tokenized))
    store_recipe = states_recipe(target, recipe.hidden_states, recipe.dtype)
    states = StateStore(arguments.store, store_recipe)
    keys = [states.key(row["input_ids"]) for row in rows]
    samples = dict(zip(keys, rows, strict=True))
    engine = parse_settings(EngineSettings, arguments.engine)
    captured = capture_missing(samples, arguments.dataset, states, recipe, arguments.target_path, engine, log)
    refs = states.find(samples)
    check_found(refs, samples)
    tokens = sum(len(row["input_ids"]) for row in rows)
    layer_ids = store_recipe["layer_ids"]
    write_json(
        arguments.out,
        {
            **manifest_header(
                "hidden_states",
                recipe.model_dump(mode="json"),
                [arguments.tokenized, arguments.target],
                ["torch", "transformers"],
            ),
            "dataset": arguments.dataset,
            "layer_ids": layer_ids,
            "hidden_size": target["hidden_size"],
            "width": len(layer_ids) * target["hidden_size"],
            "dtype": recipe.hidden_states.dtype,
            "samples": [
                {"id": row["id"], "key": key, "tokens": refs[key].tokens, "sha256": refs[key].sha256}
                for row, key in zip(rows, keys, strict=True)
            ],
            "counts": {"samples": len(rows), "tokens": tokens},
        },
    )
    log.info(
        "%s: %d samples of %d tokens, %d captured now, %d found in the store, %.1f s",
        *(arguments.dataset, len(rows), tokens, captured, len(samples) - captured),
        time.monotonic() - start,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", required=True, help="the dataset's name in the configuration")
    parser.add_argument("--tokenized", type=Path, required=True, help="tokenized_data.jsonl")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target")
    parser.add_argument("--recipe", required=True, help="JSON: what the states depend on")
    parser.add_argument("--engine", required=True, help="JSON: threads and batches, which change no result")
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--out", type=Path, required=True, help="manifest.json")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
