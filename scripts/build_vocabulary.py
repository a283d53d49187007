"""Choose the draft vocabulary: the tokens that the training rows supervise most often.

Inputs: the datasets' tokenized rows and target.json, and an earlier vocabulary where one is pinned. Output:
vocabulary.json with the rising target ids and the share of supervised tokens they cover. Only rows of the
train split choose; those of the validation split are counted for their coverage, and held-out rows are not
looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eyrie.console import run_command, start_log
from eyrie.eagle3.vocabulary import (
    check_coverage,
    choose_tokens,
    count_tokens,
    coverage,
    pinned_tokens,
)
from eyrie.gates import GateError
from eyrie.provenance import manifest_header
from eyrie.records import read_json, read_jsonl, write_json


def _rows(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in sorted(paths):
        yield from (row for row in read_jsonl(path) if row["split"] != "held_out")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def main() -> None:
    """Count, choose, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenized", type=Path, nargs="+", required=True, help="tokenized_data.jsonl files")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--size", type=int, required=True, help="tokens of the draft vocabulary")
    parser.add_argument("--pinned", type=Path, help="vocabulary.json or model.safetensors to take as it is")
    parser.add_argument("--min-coverage", type=float, help="smallest share of validation tokens it must hold")
    parser.add_argument("--out", type=Path, required=True, help="vocabulary.json")
    parser.add_argument("--log", type=Path, help="log file")
    arguments = parser.parse_args()
    log = start_log("build_vocabulary", arguments.log)

    vocab_size = read_json(arguments.target)["vocab_size"]
    counts = count_tokens(_rows(arguments.tokenized), vocab_size)
    supervised = {split: frequencies.supervised for split, frequencies in counts.items()}
    train = supervised.get("train")
    if train is None or not train.any():
        raise GateError(
            f"no supervised token in the train split of {len(arguments.tokenized)} files\n"
            "  expected answers to count\n  change: more samples, or split.validation and split.held_out"
        )
    if arguments.pinned is None:
        token_ids = choose_tokens(counts["train"], arguments.size)
    else:
        token_ids = pinned_tokens(arguments.pinned, vocab_size, arguments.size)
    shares = {
        "train": coverage(train, token_ids),
        "validation": coverage(supervised.get("validation"), token_ids),
    }
    check_coverage(shares["validation"], arguments.min_coverage)
    pinned = [] if arguments.pinned is None else [arguments.pinned]
    parents = [*arguments.tokenized, arguments.target, *pinned]
    write_json(
        arguments.out,
        {
            **manifest_header("vocabulary", {"draft_vocab_size": arguments.size}, parents),
            "draft_vocab_size": arguments.size,
            "vocab_size": vocab_size,
            "token_ids": token_ids.tolist(),
            "coverage": shares,
            "supervised_tokens": int(train.sum()),
            "distinct": int(np.count_nonzero(train)),
        },
    )
    log.info(
        "%s %d of %d tokens by %d supervised ones (%d different), covering %s of train, %s of validation",
        "chose" if arguments.pinned is None else "took the pinned",
        arguments.size,
        vocab_size,
        train.sum(),
        np.count_nonzero(train),
        _percent(shares["train"]),
        _percent(shares["validation"]),
    )


if __name__ == "__main__":
    run_command(main)
