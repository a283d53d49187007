"""Capture the target's hidden states over a dataset's samples, and name them in a manifest.

Inputs: tokenized_data.jsonl, target.json and the target's folder. Output: manifest.json, with every sample's
key and digest. The states lie in the store; those that the answering pass left there are not made again, and
the model is loaded only when some are missing.

With hidden_states.top_tokens the target's distribution over the draft vocabulary is stored instead of its
last state; what the answering pass left is then converted, which takes the target's head alone.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eyrie.budget import bytes_per_token, check_disk, shape_of
from eyrie.config import ConfigError, EngineSettings, HiddenStatesSettings, Settings, parse_settings
from eyrie.console import Progress, run_command, start_log
from eyrie.eagle3.initialise import TargetWeights
from eyrie.eagle3.vocabulary import read_vocabulary
from eyrie.encoding import Encoded, decode
from eyrie.gates import GateError
from eyrie.provenance import manifest_header
from eyrie.records import read_json, read_jsonl, write_json
from eyrie.states import states_recipe
from eyrie.store import StateRef, States, StateStore, StoreError
from eyrie.top_tokens import Likeliest, vocabulary_digest

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
    likeliest: Likeliest | None,
    log: logging.Logger,
) -> int:
    """Capture the samples {key: row} that the store has no states of; returns how many.

    likeliest: makes the distributions that are stored in place of the last states.
    """
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
        for group in InProcessEngine(target, engine).capture(missing, recipe.hidden_states.computed_dtype):
            if not checked:
                check_capture(target, group[0], samples[states.key(group[0].token_ids)], log)
                checked = True
            writer.add(group if likeliest is None else [likeliest.shorten(one) for one in group])
            progress.advance(sum(len(sample.token_ids) for sample in group))
        tokens, seconds = sum(map(len, missing)), progress.close()
        log.info("captured %d tokens in %.1f s, %.0f tokens/s", tokens, seconds, tokens / seconds)
    return len(missing)


def convert_found(
    samples: Mapping[str, Mapping[str, Any]],
    dataset: str,
    left: StateStore,
    states: StateStore,
    likeliest: Likeliest,
    group_size: int,
    log: logging.Logger,
) -> int:
    """Store the samples {key: row} whose last states are in `left` with top tokens instead; returns how many.

    The layers are taken over to the bit, and the target is not run.
    """
    with states.writer(dataset) as writer:
        done = states.find(samples)
        keys = [left.key(row["input_ids"]) for key, row in samples.items() if key not in done]
        refs = sorted(left.find(keys).values(), key=lambda ref: (ref.shard, ref.start))
        if not refs:
            return 0
        progress = Progress(sum(ref.tokens for ref in refs), "tokens converted", log)
        for start in range(0, len(refs), group_size):
            group = refs[start : start + group_size]
            pairs = zip(group, left.read(group), strict=True)
            writer.add_encoded([_converted(ref, stored, likeliest) for ref, stored in pairs])
            progress.advance(sum(ref.tokens for ref in group))
        progress.close()
    return len(refs)


def _converted(ref: StateRef, stored: Encoded, likeliest: Likeliest) -> Encoded:
    if stored.digest() != ref.sha256:
        raise StoreError(
            f"{ref.shard}: sample {ref.key} is not what was stored: digest {stored.digest()}, expected "
            f"{ref.sha256}\n  change: `python scripts/verify_store.py`, then run again"
        )
    last = decode(stored).last
    assert last is not None
    return stored.with_top(likeliest.of(last))


def make_likeliest(
    vocabulary: Path | None, k: int | None, target: Mapping[str, Any], path: Path
) -> tuple[Likeliest | None, str | None]:
    """What makes top tokens, and the digest of their vocabulary; nothing where none are wanted."""
    if k is None:
        return None, None
    if vocabulary is None:
        raise ConfigError("hidden_states.top_tokens needs a draft vocabulary: --vocabulary vocabulary.json")
    token_ids = read_vocabulary(vocabulary, target["vocab_size"])

    def head() -> torch.Tensor:
        from eyrie.target import read_text_config  # noqa: PLC0415 - see above

        tied = read_text_config(path).tie_word_embeddings
        return TargetWeights(path, target["files"]).head(tied)

    return Likeliest(head, token_ids, k), vocabulary_digest(token_ids)


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
    assert captured.last is not None
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
    settings, engine = recipe.hidden_states, parse_settings(EngineSettings, arguments.engine)
    likeliest, vocabulary = make_likeliest(
        arguments.vocabulary, settings.top_tokens, target, arguments.target_path
    )
    store_recipe = states_recipe(target, settings, recipe.dtype, vocabulary)
    states = StateStore(arguments.store, store_recipe)
    keys = [states.key(row["input_ids"]) for row in rows]
    samples = dict(zip(keys, rows, strict=True))
    draft_vocab_size = None if likeliest is None else likeliest.draft_vocab_size
    each = bytes_per_token(settings, *shape_of(target, settings), draft_vocab_size)
    found = states.find(samples)
    missing = sum(len(row["input_ids"]) for key, row in samples.items() if key not in found)
    what = f"tokens of {arguments.dataset}"
    check_disk(arguments.store, missing, each, arguments.disk_reserve, what, log)
    converted = 0
    if likeliest is not None and missing:
        left = StateStore(arguments.store, states_recipe(target, settings, recipe.dtype))
        size = engine.batch_size
        converted = convert_found(samples, arguments.dataset, left, states, likeliest, size, log)
    captured = capture_missing(
        samples, arguments.dataset, states, recipe, arguments.target_path, engine, likeliest, log
    )
    refs = states.find(samples)
    check_found(refs, samples)
    tokens = sum(len(row["input_ids"]) for row in rows)
    layer_ids = store_recipe["layer_ids"]
    write_json(
        arguments.out,
        {
            **manifest_header(
                "hidden_states",
                {**recipe.model_dump(mode="json"), "hidden_states": settings.as_recipe()},
                [arguments.tokenized, arguments.target, *([arguments.vocabulary] if likeliest else [])],
                ["torch", "transformers"],
            ),
            "dataset": arguments.dataset,
            "layer_ids": layer_ids,
            "hidden_size": target["hidden_size"],
            "width": len(layer_ids) * target["hidden_size"],
            "dtype": settings.dtype,
            **({"top_tokens": settings.top_tokens, "draft_vocabulary": vocabulary} if likeliest else {}),
            "bytes_per_token": each,
            "samples": [
                {"id": row["id"], "key": key, "tokens": refs[key].tokens, "sha256": refs[key].sha256}
                for row, key in zip(rows, keys, strict=True)
            ],
            "counts": {"samples": len(rows), "tokens": tokens},
        },
    )
    log.info(
        "%s: %d samples of %d tokens, %d captured now, %d converted, %d found in the store, %d bytes a "
        "token, %.1f s",
        *(arguments.dataset, len(rows), tokens, captured, converted),
        *(len(samples) - captured - converted, each),
        time.monotonic() - start,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", required=True, help="the dataset's name in the configuration")
    parser.add_argument("--tokenized", type=Path, required=True, help="tokenized_data.jsonl")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target")
    parser.add_argument("--vocabulary", type=Path, nargs="?", help="vocabulary.json, for top tokens")
    parser.add_argument("--recipe", required=True, help="JSON: what the states depend on")
    parser.add_argument("--engine", required=True, help="JSON: threads and batches, which change no result")
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--disk-reserve", type=int, default=0, help="bytes to leave free on its disk")
    parser.add_argument("--out", type=Path, required=True, help="manifest.json")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
