"""The held-out prompts: read from tokenized samples, chosen and ordered the same way every time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from eyrie.gates import GateError
from eyrie.records import read_jsonl


@dataclass(frozen=True)
class HeldOutPrompt:
    """The tokens before a held-out sample's first supervised one, and the answer stored after them."""

    id: str
    dataset: str
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class HeldOut:
    """All held-out prompts by dataset, sorted by id.

    families: the datasets in which several rows share a group, so that a held-out prompt has no relative in
    training. without_prompt: held-out rows by dataset that are supervised from their first token on.
    """

    prompts: dict[str, list[HeldOutPrompt]]
    families: list[str]
    without_prompt: dict[str, int]


def read_held_out(paths: Iterable[Path]) -> HeldOut:
    """The rows of `tokenized_data.jsonl` files whose split is held_out; no other share is looked at.

    Raises GateError where there is none.
    """
    prompts: dict[str, list[HeldOutPrompt]] = defaultdict(list)
    without_prompt: dict[str, int] = defaultdict(int)
    groups: dict[str, set[str]] = defaultdict(set)
    rows: dict[str, int] = defaultdict(int)
    for path in sorted(paths):
        for row in read_jsonl(path):
            name = row["dataset"]
            groups[name].add(row["group"])
            rows[name] += 1
            if row["split"] != "held_out":
                continue
            start = row["loss_mask"].index(1)
            end = start + sum(1 for _ in takewhile(bool, row["loss_mask"][start:]))
            if start:
                prompt_ids, answer_ids = row["input_ids"][:start], row["input_ids"][start:end]
                prompts[name].append(HeldOutPrompt(row["id"], name, prompt_ids, answer_ids))
            else:
                without_prompt[name] += 1
    if not prompts:
        raise GateError(
            f"no held-out prompt to judge the drafter on\n"
            f"  seen: {sum(rows.values())} rows in {len(rows)} datasets, none of them held out with a "
            f"prompt; {sum(without_prompt.values())} held out but supervised from the first token on\n"
            f"  expected: at least one row with split held_out\n"
            f"  change: raise split.held_out, or datasets.*.samples so that a group falls into that share"
        )
    return HeldOut(
        {name: sorted(prompts[name], key=lambda prompt: prompt.id) for name in sorted(prompts)},
        sorted(name for name in rows if rows[name] > len(groups[name])),
        dict(sorted(without_prompt.items())),
    )


def choose_prompts(
    prompts: Mapping[str, Sequence[HeldOutPrompt]], per_dataset: int
) -> dict[str, list[HeldOutPrompt]]:
    """At most `per_dataset` prompts of each dataset: the first by id, which is a hash and so a fair draw."""
    return {name: list(rows[:per_dataset]) for name, rows in prompts.items()}


def round_robin(chosen: Mapping[str, Sequence[HeldOutPrompt]]) -> list[HeldOutPrompt]:
    """The first prompt of every dataset, then the second of each, and so on; a prefix favours none."""
    longest = max(map(len, chosen.values()))
    return [rows[rank] for rank in range(longest) for rows in chosen.values() if rank < len(rows)]
