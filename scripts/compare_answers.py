"""Compare the greedy answers of two engines, token for token, and say how close the call was where they part.

    python scripts/compare_answers.py --ours work/NAME/tokenized --theirs work-vllm/NAME/tokenized
        --target-path models/NAME --out work-vllm/comparison.json

Two right engines part only where the target holds two tokens for equally good up to rounding; after that the
answers go their own ways. At each first difference the target is run in process over what both have in
common: the margin is how far the lower of the two tokens' logits lies below the best of all. In float32 a
margin of at least --limit is no rounding, and the command fails. With another --dtype all is only reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyrie.console import run_command, start_log
from eyrie.errors import BuildError
from eyrie.records import read_jsonl, write_json
from eyrie.target import Target


class DifferenceError(BuildError):
    """Two engines gave answers that can't both be the target's."""


@dataclass(frozen=True)
class Parting:
    """Where two answers to a prompt part: the place in the answer, both tokens, and the in-process logits.

    An answer that ended where the other goes on has no token there: -1. margin: how far the lower of the two
    logits lies below the best one. top_two: the distance of the two best logits.
    """

    dataset: str
    id: str
    place: int
    ours: int
    theirs: int
    margin: float
    top_two: float


def answers(folder: Path) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
    """Prompt and answer of every greedily answered row below a folder of tokenized datasets."""
    found = {}
    for path in sorted(folder.glob("*/tokenized_data.jsonl")):
        for row in read_jsonl(path):
            if row["greedy"]:
                start = row["loss_mask"].index(1)
                found[row["dataset"], row["id"]] = (row["input_ids"][:start], row["input_ids"][start:])
    return found


def partings(ours: Path, theirs: Path, target: Target) -> tuple[int, Iterator[Parting]]:
    """How many prompts both answered, and where their answers part. Raises DifferenceError."""
    mine, others = answers(ours), answers(theirs)
    if mine.keys() != others.keys() or not mine:
        alone = sorted(mine.keys() ^ others.keys())[:3]
        raise DifferenceError(
            f"{len(mine)} answers below {ours}, {len(others)} below {theirs}; one side alone: {alone}\n"
            "  expected: answers to the same prompts, and some\n"
            "  change: build `responses` with both engines from the same configuration"
        )
    return len(mine), _partings(mine, others, target)


def _partings(
    mine: dict[tuple[str, str], tuple[list[int], list[int]]],
    others: dict[tuple[str, str], tuple[list[int], list[int]]],
    target: Target,
) -> Iterator[Parting]:
    for (dataset, name), (prompt, answer) in mine.items():
        other_prompt, other = others[dataset, name]
        if prompt != other_prompt:
            raise DifferenceError(
                f"{dataset} {name}: the two prompts differ\n  expected: the same token ids\n"
                "  change: build both from the same configuration and target"
            )
        if answer != other:
            place = first_difference(answer, other)
            pair = _token(answer, place), _token(other, place)
            margin, top_two = margins(target, prompt + answer[:place], pair)
            yield Parting(dataset, name, place, *pair, round(margin, 6), round(top_two, 6))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place where two different sequences differ; the shorter one's end where it is a beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _token(answer: Sequence[int], place: int) -> int:
    return answer[place] if place < len(answer) else -1


def margins(target: Target, ids: list[int], pair: Sequence[int]) -> tuple[float, float]:
    """After these ids: how far the pair's lower logit lies below the best, and the second-best one does.

    A token of -1 stands for no token and is infinitely far below.
    """
    logits = target.logits(target.forward(torch.tensor([ids])).last[0, -1:])[0].double()
    best, second = logits.topk(2).values.tolist()
    lower = min((logits[token].item() if token >= 0 else float("-inf")) for token in pair)
    return best - lower, best - second


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True, help="folder of tokenized datasets, in process")
    parser.add_argument("--theirs", type=Path, required=True, help="folder of the same by another engine")
    parser.add_argument("--target-path", type=Path, required=True, help="the target's folder")
    parser.add_argument("--dtype", default="float32", help="numbers of the other engine; float32 is judged")
    parser.add_argument("--limit", type=float, default=1e-3, help="margin that is still rounding in float32")
    parser.add_argument("--out", type=Path, required=True, help="the comparison as JSON")
    arguments = parser.parse_args()
    log = start_log("compare_answers", None)
    # The margin is the target's own, whatever the other engine computes with.
    target = Target(arguments.target_path, "float32")
    count, found = partings(arguments.ours, arguments.theirs, target)
    parted: list[dict[str, Any]] = []
    for parting in found:
        parted.append(asdict(parting))
        log.info(
            "%s %s parts at token %d: %d here, %d there, margin %.6f, top two %.6f",
            *(parting.dataset, parting.id, parting.place, parting.ours, parting.theirs),
            *(parting.margin, parting.top_two),
        )
    far = [one for one in parted if not one["margin"] < arguments.limit]
    write_json(
        arguments.out,
        {"answers": count, "dtype": arguments.dtype, "limit": arguments.limit, "parted": parted},
    )
    log.info(
        "%d answers, %d equal, %d part, %d of these by more than %g",
        count,
        count - len(parted),
        len(parted),
        len(far),
        arguments.limit,
    )
    if far and arguments.dtype == "float32":
        worst = max(far, key=lambda one: float(one["margin"]))
        raise DifferenceError(
            f"{len(far)} of {count} answers part where the target prefers a token by more than rounding\n"
            f"  the widest: {worst}\n"
            "  expected: in float32 two engines part only where two logits are equal up to rounding\n"
            "  change: the server's model, dtype or sampling defaults; one of the engines is wrong"
        )


if __name__ == "__main__":
    run_command(main)
