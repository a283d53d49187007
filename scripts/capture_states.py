"""Capture the target's hidden states over a dataset's samples, and name them in a manifest.

Inputs: tokenized_data.jsonl, target.json and the target's folder. Output: manifest.json, with every sample's
key and digest. The states lie in the store; those that the answering pass left there are not made again, and
an engine is opened only when some are missing: the target in this process, or servers (engine.capture).

With hidden_states.top_tokens the target's distribution over the draft vocabulary is stored instead of its
last state; what the answering pass left is then converted, which takes the target's head alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from eyrie.budget import bytes_per_token, check_disk, shape_of
from eyrie.config import EngineSettings, HiddenStatesSettings, SamplingSettings, Settings, parse_settings
from eyrie.console import Progress, run_command, start_log
from eyrie.conversion import convert_found, make_likeliest
from eyrie.eagle3.batches import target_choices
from eyrie.engines.numbering import proofs_of
from eyrie.gates import GateError
from eyrie.provenance import manifest_header
from eyrie.records import read_json, read_jsonl, write_json
from eyrie.states import states_recipe
from eyrie.stopping import StopRequest, end_with_snakemake
from eyrie.store import StateRef, States, StateStore, StateWriter, StoreError
from eyrie.target_weights import TargetWeights
from eyrie.top_tokens import Likeliest

if TYPE_CHECKING:
    from eyrie.engines.opening import Wanted

# Share of greedy answers' tokens that the captured states must give. Not all: states are stored with fewer
# digits than they were computed with, and near ties happen. Looked at are so many samples, and so many tokens
# of each: the head is a large matrix.
_AGREEMENT = 0.9
_AGREEING_SAMPLES, _AGREEING_TOKENS = 4, 128
# Requests at once to each server, where the command line does not say.
_IN_FLIGHT = 16


class CaptureRecipe(Settings):
    """What the states of given tokens depend on beside the target."""

    version: int
    dtype: str
    hidden_states: HiddenStatesSettings


def capture_missing(
    missing: Sequence[list[int]],
    states: StateStore,
    recipe: CaptureRecipe,
    target: Mapping[str, Any],
    likeliest: Likeliest | None,
    arguments: argparse.Namespace,
    log: logging.Logger,
) -> None:
    """Capture the states of these samples and store them; every group is durable when the next is stored.

    likeliest: makes the distributions that are stored in place of the last states.
    """
    # Engines and the target's library take seconds to load, and most runs find everything in the store.
    from eyrie.engines.opening import open_capture  # noqa: PLC0415
    from eyrie.engines.proving import prove_layers  # noqa: PLC0415

    settings = parse_settings(EngineSettings, arguments.engine)
    wanted = _wanted(recipe, target, states, max(map(len, missing)), arguments)
    dtype = recipe.hidden_states.computed_dtype
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(settings.stop_grace))
        writer = stack.enter_context(states.writer(arguments.dataset))
        capture, described = stack.enter_context(open_capture(settings, wanted, stop))
        prove_layers(
            *(states, arguments.dataset, described, wanted),
            lambda: next(iter(capture.capture([list(wanted.canary_prompt)], dtype)))[0],
            getattr(capture, "target", None),
        )
        progress = Progress(sum(map(len, missing)), "tokens", log)
        with WrittenBehind(writer) as behind:
            for group in capture.capture(missing, dtype):
                behind.add(group if likeliest is None else [likeliest.shorten(one) for one in group])
                progress.advance(sum(len(sample.token_ids) for sample in group))
        tokens, seconds = sum(map(len, missing)), progress.close()
        log.info("captured %d tokens in %.1f s, %.0f tokens/s", tokens, seconds, tokens / seconds)


def _wanted(
    recipe: CaptureRecipe,
    target: Mapping[str, Any],
    states: StateStore,
    longest: int,
    arguments: argparse.Namespace,
) -> Wanted:
    from eyrie.chat import Chat  # noqa: PLC0415 - see above
    from eyrie.engines.canary import CANARY_MESSAGES  # noqa: PLC0415
    from eyrie.engines.opening import Wanted  # noqa: PLC0415
    from eyrie.remote_code import trusted_code  # noqa: PLC0415

    in_flight = json.loads(arguments.in_flight)[arguments.dataset] if arguments.in_flight else _IN_FLIGHT
    chat = Chat(arguments.target_path, trusted_code(target, arguments.target_path))
    return Wanted(
        target=target,
        path=arguments.target_path,
        dtype=recipe.dtype,
        states=recipe.hidden_states,
        sampling=SamplingSettings(max_new_tokens=1, max_in_flight=in_flight),
        context=longest + 1,
        canary_prompt=chat.prompt_ids(CANARY_MESSAGES),
        canaries=states.folder / "canaries",
        server_log=(arguments.log or arguments.out).with_suffix(".server.log"),
        arriving=arguments.store / "arriving" / arguments.dataset,
    )


class WrittenBehind:
    """Stores groups of states in a thread, one at a time, while the next ones are captured.

    Memory holds two groups; leaving the block waits for the last. What storing raises, the next call raises.
    """

    def __init__(self, writer: StateWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._storing: Future[object] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None:
            self._wait()

    def add(self, group: Sequence[States]) -> None:
        """Store a group once the one before it is stored."""
        self._wait()
        self._storing = self._thread.submit(self._writer.add, group)

    def _wait(self) -> None:
        if self._storing is not None:
            self._storing.result()
            self._storing = None


def agreement(
    samples: Mapping[str, Mapping[str, Any]],
    refs: Mapping[str, StateRef],
    states: StateStore,
    head: Callable[[], torch.Tensor],
) -> dict[str, Any] | None:
    """Of how many tokens of greedy answers the states before them say that they are the likeliest next ones.

    samples: {key: row}; those of the lowest keys are looked at, whoever captured them and when, so that the
    figure follows from the store. head: reads the target's, [V, H]; asked where last states are stored. None
    where no answer was greedy. Raises GateError where too few agree.
    """
    chosen = [key for key in sorted(samples) if samples[key]["greedy"]][:_AGREEING_SAMPLES]
    if not chosen:
        return None
    pairs, following = [], []
    for key, found in zip(chosen, states.load([refs[key] for key in chosen]), strict=True):
        places = torch.tensor(samples[key]["loss_mask"])[1:].nonzero()[:_AGREEING_TOKENS, 0]
        following.append(torch.tensor(found.token_ids)[places + 1])
        pairs.append((found, places))
    agreed = int((_choices(pairs, head) == torch.cat(following)).sum())
    tokens = sum(map(len, following))
    if agreed < _AGREEMENT * tokens:
        raise GateError(
            f"the captured states give {agreed} of {tokens} tokens of greedy answers, of samples "
            f"{', '.join(str(samples[key]['id']) for key in chosen)}\n"
            f"  expected: the target's own next token, at least {_AGREEMENT:.0%} of them\n"
            "  change: the target's folder, which must be the one that answered; or, if states were captured "
            "wrong (rows rotated against the tokens, a last state that is not normed), delete them from the "
            "store; then run again"
        )
    return {"samples": len(chosen), "tokens": tokens, "share": round(agreed / tokens, 4) if tokens else 1.0}


def _choices(pairs: Sequence[tuple[States, torch.Tensor]], head: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The target's most likely token after each place, sample after sample."""
    # Where the store keeps the distribution in the last state's place, it says which token was likeliest.
    told = [found.top.choices[places] for found, places in pairs if found.top is not None]
    lasts = [found.last[places] for found, places in pairs if found.last is not None]
    return torch.cat([*told, *target_choices(torch.cat(lasts), head())] if lasts else told)


def _missing(samples: Mapping[str, Mapping[str, Any]], states: StateStore) -> list[list[int]]:
    """The token ids of the samples {key: row} that the store has no states of."""
    found = states.find(samples)
    return [row["input_ids"] for key, row in samples.items() if key not in found]


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
    end_with_snakemake()
    arguments = _arguments()
    log = start_log("capture_states", arguments.log)
    start = time.monotonic()
    recipe = parse_settings(CaptureRecipe, arguments.recipe)
    target = read_json(arguments.target)
    rows = list(read_jsonl(arguments.tokenized))
    settings = recipe.hidden_states
    likeliest, vocabulary = make_likeliest(
        arguments.vocabulary, settings.top_tokens, target, arguments.target_path
    )
    store_recipe = states_recipe(target, settings, recipe.dtype, vocabulary)
    states = StateStore(arguments.store, store_recipe)
    keys = [states.key(row["input_ids"]) for row in rows]
    samples = dict(zip(keys, rows, strict=True))
    missing = _missing(samples, states)
    draft_vocab_size = None if likeliest is None else likeliest.draft_vocab_size
    each = bytes_per_token(settings, *shape_of(target, settings), draft_vocab_size)
    what = f"tokens of {arguments.dataset}"
    check_disk(arguments.store, sum(map(len, missing)), each, arguments.disk_reserve, what, log)
    converted = 0
    if likeliest is not None:
        left = StateStore(arguments.store, states_recipe(target, settings, recipe.dtype))
        if missing:
            with_last = settings.model_copy(update={"top_tokens": None})
            left_each = bytes_per_token(with_last, *shape_of(target, settings))
            converted = convert_found(samples, arguments.dataset, left, states, likeliest, left_each, log)
            missing = _missing(samples, states)
    if missing:
        capture_missing(missing, states, recipe, target, likeliest, arguments, log)
    refs = states.find(samples)
    check_found(refs, samples)
    agreed = agreement(
        samples, refs, states, lambda: TargetWeights(arguments.target_path, target["files"]).head()
    )
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
            # Which proofs of the layers' numbering the states rest on, and how well they fit the answers.
            "numbering": proofs_of([states] if likeliest is None else [states, left], arguments.dataset),
            "agreement": agreed,
        },
    )
    log.info(
        "%s: %d samples of %d tokens, %d captured now, %d converted, %d found in the store, %d bytes a "
        "token, %.1f s",
        *(arguments.dataset, len(rows), tokens, len(missing), converted),
        *(len(samples) - len(missing) - converted, each),
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
    parser.add_argument("--engine", required=True, help="JSON: who captures, which changes no key")
    parser.add_argument("--in-flight", help="JSON: requests at once to each server, by dataset")
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--disk-reserve", type=int, default=0, help="bytes to leave free on its disk")
    parser.add_argument("--out", type=Path, required=True, help="manifest.json")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
