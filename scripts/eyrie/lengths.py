"""How long samples are: prompt and answer tokens of every row of tokenized_data.jsonl, read fast.

Rows hold their ids and masks as lists, which take most of the file. Their commas and ones are counted where
they stand in the line, so a million tokens take a few milliseconds and the memory of one line.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eyrie.records import RecordError

_IDS, _MASK = b'"input_ids":[', b'"loss_mask":['


@dataclass(frozen=True)
class Lengths:
    """Tokens of each of a dataset's samples: supervised ones (answer), and all the others (prompt)."""

    prompt: array[int]
    answer: array[int]


def read_lengths(path: Path) -> Lengths:
    """The lengths of all rows. Raises RecordError for rows that no command of ours wrote."""
    lengths = Lengths(array("I"), array("I"))
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            ids = line.find(_IDS)
            mask = line.find(_MASK, ids)
            end = line.find(b"]", mask)
            if ids < 0 or mask < 0 or end < 0:
                raise RecordError(
                    f"{path}:{number}: expected a row with input_ids and then loss_mask, as "
                    "scripts/answer_prompts.py and scripts/tokenize_conversations.py write it"
                )
            start = mask + len(_MASK)
            tokens = line.count(b",", start, end) + (end > start)
            answer = line.count(b"1", start, end)
            lengths.prompt.append(tokens - answer)
            lengths.answer.append(answer)
    return lengths


def quantiles(lengths: array[int], shares: Iterable[float]) -> list[int]:
    """The lengths that these shares of the samples do not exceed; zeros where there is no sample."""
    ordered = sorted(lengths)
    return [ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0 for share in shares]


def histogram(lengths: array[int]) -> tuple[list[int], list[int]]:
    """Lower edges of bins and the samples in each, from the first bin with a sample to one behind the last.

    Four bins an octave: an edge is a power of two's fourth root, rounded. Empty where there is no sample.
    """
    if not lengths:
        return [], []
    edges = [0]
    while edges[-1] <= max(lengths):
        edges.append(max(edges[-1] + 1, round(2 ** (len(edges) / 4))))
    counts = [0] * len(edges)
    place, ordered = 0, sorted(lengths)
    for length in ordered:
        while length >= edges[place + 1]:
            place += 1
        counts[place] += 1
    first = next(index for index, count in enumerate(counts) if count)
    return edges[first:], counts[first:]
