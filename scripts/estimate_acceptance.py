"""Estimate acceptance from stored hidden states: what a decoder would accept on all held-out samples.

No target runs. At every place of the held-out answers the drafter drafts a chain, fed with its own tokens and
states, and speculative decoding is replayed over the answers that are there. Greedy: a draft is right where
it is the target's most likely token, which in a greedy answer is the answer's own; for other answers it is
taken from the stored states. Sampled: a draft is accepted with the probability that speculative sampling
gives it, the sum of min(p, q), and the walk is in expectation. Output: acceptance.json.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyrie.bootstrap import Floats
from eyrie.config import ConfigError
from eyrie.console import Progress, run_command, start_log
from eyrie.eagle3.batches import Sample
from eyrie.eagle3.chains import draft_greedily, grouped, overlaps
from eyrie.eagle3.checkpoint import load_drafter
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.processes import ALONE, choose_device
from eyrie.eagle3.samples import (
    Captures,
    CheckedStates,
    Row,
    StoredSamples,
    find_choices,
    read_captures,
    read_rows,
)
from eyrie.estimating import MODES, Drafted, Tally, repetition_figures, walk_figures, warnings
from eyrie.gates import GateError
from eyrie.provenance import manifest_header
from eyrie.records import read_json, write_json
from eyrie.replay import Answer, find_answers
from eyrie.store import StateStore
from eyrie.target import read_text_config
from eyrie.target_weights import TargetWeights


def main() -> None:
    """Run the command."""
    arguments = _arguments()
    log = start_log("estimate_acceptance", arguments.log)
    recipe = json.loads(arguments.recipe)
    torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    target = read_json(arguments.target)
    captures = read_captures(arguments.manifests, target)
    states = StateStore(arguments.store, captures.recipe)
    rows = _choose_rows(read_rows(arguments.tokenized, states, captures, ["held_out"]), recipe)

    weights = TargetWeights(arguments.target_path, target["files"])
    head = weights.head(read_text_config(arguments.target_path).tie_word_embeddings).to(device).float()
    drafter = load_drafter(arguments.checkpoint, weights.embedding(), torch.float32).to(device)
    _check_layers(drafter, captures, arguments.checkpoint)
    checked = CheckedStates(rows, states, captures)
    choices = find_choices(rows, checked, head, "aligned", ALONE, log)
    samples = StoredSamples(rows, choices, checked, "aligned")
    lengths = list(dict.fromkeys(recipe["draft_tokens"]))
    progress = Progress(len(rows), "samples", log)
    drafted = list(
        draft_all(drafter, samples, rows, target["eos_ids"], max(lengths), head, progress=progress)
    )
    seconds = progress.close()

    figures = _figures(drafted, lengths, recipe["datasets"], captures)
    parents = [arguments.checkpoint / name for name in ("model.safetensors", "config.json")]
    parents += [arguments.target, *arguments.tokenized, *arguments.manifests]
    header = manifest_header("acceptance", recipe, parents, ["torch", "numpy"])
    write_json(arguments.out, header | figures)
    _log_figures(log, figures)
    log.info("%d samples, %d answers, %.0f s -> %s", len(rows), len(drafted), seconds, arguments.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the drafter's checkpoint")
    parser.add_argument("--tokenized", type=Path, nargs="+", required=True, help="tokenized_data.jsonl files")
    parser.add_argument("--manifests", type=Path, nargs="+", required=True, help="manifest.json files")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target's weights")
    parser.add_argument(
        "--recipe",
        required=True,
        help='JSON: {"version", "draft_tokens": [3], "rows_per_dataset": null, "datasets": {NAME: {"kind", '
        '"partition"}}}',
    )
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="what computes")
    parser.add_argument("--out", type=Path, required=True, help="acceptance.json")
    parser.add_argument("--log", type=Path, help="log file")
    return parser.parse_args()


def _choose_rows(rows: Sequence[Row], recipe: Mapping[str, Any]) -> list[Row]:
    """The rows to judge on: of each dataset the first ones by id, which is a hash and so a fair draw."""
    names = sorted({row.dataset for row in rows})
    unknown = [name for name in names if name not in recipe["datasets"]]
    if unknown:
        raise ConfigError(f"--recipe: datasets tells nothing of {', '.join(unknown)}, whose rows were given")
    chosen = []
    for name in names:
        members = sorted((row for row in rows if row.dataset == name), key=lambda row: row.id)
        chosen += members[: recipe["rows_per_dataset"]]
    if not any(len(answer.places) for row in chosen for answer in _answers(row, [])):
        raise GateError(
            f"no held-out answer to judge the drafter on\n  seen: {len(chosen)} rows with split held_out\n"
            "  expected: at least one with an answer of two tokens\n"
            "  change: raise split.held_out, or datasets.*.samples so that a group falls into that share"
        )
    return chosen


def _check_layers(drafter: Drafter, captures: Captures, checkpoint: Path) -> None:
    if list(drafter.config.layer_ids) != list(captures.layer_ids):
        raise GateError(
            f"{checkpoint}: the drafter takes layers {list(drafter.config.layer_ids)}; the stored states are "
            f"of layers {captures.layer_ids}\n  expected the same\n"
            "  change: hidden_states.layer_ids, or judge the drafter that was trained on these states"
        )


def _answers(row: Row, eos_ids: Sequence[int], limit: int | None = None) -> list[Answer]:
    return find_answers(row.token_ids.tolist(), row.loss_mask.tolist(), eos_ids, limit)


def draft_all(
    drafter: Drafter,
    samples: StoredSamples | Sequence[Sample],
    rows: Sequence[Row],
    eos_ids: Sequence[int],
    draft_tokens: int,
    head: torch.Tensor,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Drafted]:
    """What is drafted at every place of the rows' answers, each cut after `limit` tokens.

    samples: the rows', in their order. head: the target's, [V, H].
    """
    following = iter(rows)
    for group in grouped(samples):
        found = [(row, _answers(row, eos_ids, limit)) for row in islice(following, len(group))]
        asked = [
            (sample, row, answers)
            for sample, (row, answers) in zip(group, found, strict=True)
            if any(len(answer.places) for answer in answers)
        ]
        if asked:
            pairs = [(sample, answers) for sample, _, answers in asked]
            rates = _rates(drafter, pairs, draft_tokens, head)
            for (_, row, answers), of_answers in zip(asked, rates, strict=True):
                tokens = row.token_ids.tolist()
                for answer, of_answer in zip(answers, of_answers, strict=True):
                    yield Drafted(row.dataset, row.group, answer, tokens, of_answer)
        if progress is not None:
            progress.advance(len(group))


def _rates(
    drafter: Drafter, asked: Sequence[tuple[Sample, list[Answer]]], draft_tokens: int, head: torch.Tensor
) -> Iterator[list[dict[str, Floats]]]:
    """Of each sample, for each of its answers, the rates by mode; see Drafted."""
    group = [sample for sample, _ in asked]
    starts = [torch.from_numpy(np.concatenate([one.positions for one in found])) for _, found in asked]
    chains = draft_greedily(drafter, group, starts, draft_tokens)
    sampled = overlaps(drafter, group, starts, draft_tokens, head)
    for (sample, found), start, chain, overlap in zip(asked, starts, chains, sampled, strict=True):
        # The target's choices, as tokens where a greedy answer has them; -1 where nothing is supervised.
        wanted = torch.full((len(sample.token_ids) + draft_tokens,), -1)
        wanted[sample.candidates + 1] = sample.choices
        right = chain == wanted[start[:, None] + 2 + torch.arange(draft_tokens)]
        sizes = [len(answer.places) for answer in found]
        parts = zip(torch.split(right, sizes), torch.split(overlap, sizes), strict=True)
        yield [
            {mode: rate.double().numpy() for mode, rate in zip(MODES, rates, strict=True)} for rates in parts
        ]


def _figures(
    drafted: Sequence[Drafted], lengths: Sequence[int], datasets: Mapping[str, Any], captures: Captures
) -> dict[str, Any]:
    tallies = {length: {mode: Tally(drafted, mode, length) for mode in MODES} for length in lengths}
    figures: dict[str, Any] = {
        "draft_tokens": list(lengths),
        "walk": {
            str(length): {mode: walk_figures(tally, drafted, datasets) for mode, tally in by_mode.items()}
            for length, by_mode in tallies.items()
        },
        "all_positions": {
            str(length): {mode: tally.all_positions() for mode, tally in by_mode.items()}
            for length, by_mode in tallies.items()
        },
        "unique_ngrams": repetition_figures(
            drafted, {length: by_mode["greedy"] for length, by_mode in tallies.items()}
        ),
        "by_group": {str(length): by_mode["greedy"].by_group() for length, by_mode in tallies.items()},
    }
    figures["warnings"] = warnings(figures) + _lacking(captures)
    return figures


def _lacking(captures: Captures) -> list[str]:
    """What the stored states don't tell, in words."""
    kept = captures.recipe.get("top_tokens")
    if kept is None:
        return []
    return [
        f"The store holds the target's {kept} likeliest tokens of the draft vocabulary and no last state. "
        "Greedy figures are not touched by that. Sampled ones take the target's probabilities as parts of "
        "the draft vocabulary's sum: they overstate by what the target gives to tokens outside it, and "
        "understate by what it gives to less likely ones."
    ]


def _log_figures(log: logging.Logger, figures: Mapping[str, Any]) -> None:
    for length, walk in figures["walk"].items():
        for mode, parts in walk.items():
            log.info("acceptance length with %s drafted, %s:", length, mode)
            shown = {"all": parts["all"], **parts["datasets"]}
            for name, one in shown.items():
                log.info("  %-24s%s", name, _in_words(one))
            every = figures["all_positions"][length][mode]
            if every is not None:
                log.info("  %-24s%8.2f, which overstates", "(mean of all positions)", every)
    for warning in figures["warnings"]:
        log.warning("warning: %s", warning)


def _in_words(one: Mapping[str, Any]) -> str:
    if one["acceptance_length"] is None:
        return "       -"
    bounds = "" if one["low"] is None else f"  {one['low']:.2f} to {one['high']:.2f}"
    return f"{one['acceptance_length']:8.2f}{bounds} ({one['groups']} groups)"


if __name__ == "__main__":
    run_command(main)
