"""The figures of acceptance.json, from what was drafted at every place of held-out answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyrie.bootstrap import Floats, interval, resampled
from eyrie.degenerate import RUN, is_degenerate
from eyrie.replay import Answer, Booleans, visits

MODES = ("greedy", "sampled")
# Answers are compared by how far they have gone: up to 16 tokens, and then at each doubling.
_FIRST_BAND = 16
# Below this share of different runs of tokens an answer repeats itself so much that it is easy to draft.
_LOOPING = 0.5
# What loops add to the acceptance length, from which on it is worth a warning.
_FLATTERY = 0.02


@dataclass(frozen=True)
class Drafted:
    """An answer with its sample's tokens and what was drafted at its places.

    rates: by mode, [places, draft tokens]: how probable it is that the token drafted there is accepted where
    those before it were.
    """

    dataset: str
    group: str
    answer: Answer
    token_ids: Sequence[int]
    rates: Mapping[str, Floats]

    @property
    def tokens(self) -> list[int]:
        """The answer's own tokens."""
        return list(self.token_ids[self.answer.start : self.answer.end])


class Tally:
    """What the replayed cycles of one mode and length of drafts add up to.

    Each row is of one answer and one band of places: the expected cycles, and of them those that accept 1,
    2, ... tokens; beside it what all full places come to without a walk.
    """

    def __init__(self, drafted: Sequence[Drafted], mode: str, draft_tokens: int) -> None:
        rows, every, labels = [], [], []
        for number, one in enumerate(drafted):
            rates = one.answer.within(one.rates[mode][:, :draft_tokens])
            joint: Floats = np.cumprod(rates, axis=1, dtype=np.float64)
            full = one.answer.full(draft_tokens)
            weights = visits(joint, full)
            bands = _bands(one.answer.places)
            for band in np.unique(bands):
                here = bands == band
                rows.append(_sums(weights[here], joint[here]))
                every.append(_sums(full[here].astype(np.float64), joint[here]))
                labels.append((number, int(band)))
        self.draft_tokens = draft_tokens
        self._sums = np.array(rows).reshape(-1, draft_tokens + 1)
        self._every = np.array(every).reshape(-1, draft_tokens + 1).sum(axis=0)
        self.answers = np.array([number for number, _ in labels], dtype=np.int64)
        self.bands = np.array([band for _, band in labels], dtype=np.int64)
        names = sorted({(one.dataset, one.group) for one in drafted})
        numbers = {name: index for index, name in enumerate(names)}
        of_answer = np.array([numbers[one.dataset, one.group] for one in drafted], dtype=np.int64)
        self._groups, self._names = of_answer[self.answers], names

    def figures(self, rows: Booleans) -> dict[str, Any]:
        """Acceptance length with its interval, cycles and rates by draft position over some of the rows."""
        present, index = np.unique(self._groups[rows], return_inverse=True)
        sums = np.zeros((len(present), self.draft_tokens + 1))
        np.add.at(sums, index, self._sums[rows])
        total = sums.sum(axis=0)
        cycles = float(total[0])
        bounds = None
        if cycles and len(present) > 1:
            bounds = interval(lengths(resampled(sums)))
        return {
            "acceptance_length": float(lengths(total)) if cycles else None,
            # One group alone tells nothing of others.
            "low": bounds and bounds[0],
            "high": bounds and bounds[1],
            "cycles": round(cycles, 3),
            "groups": len(present),
            "by_position": (total[1:] / cycles).tolist() if cycles else [],
        }

    def by_group(self) -> list[list[Any]]:
        """[dataset, group, cycles, tokens accepted in them] of every group, for comparisons over groups."""
        sums = np.zeros((len(self._names), 2))
        np.add.at(sums, self._groups, np.stack([self._sums[:, 0], self._sums[:, 1:].sum(axis=1)], axis=1))
        return [
            [*name, round(cycles, 6), round(accepted, 6)]
            for name, (cycles, accepted) in zip(self._names, sums.tolist(), strict=True)
        ]

    def all_positions(self) -> float | None:
        """The mean over all full places, were there no walk; it overstates."""
        return float(lengths(self._every)) if self._every[0] else None


def _sums(weights: Floats, joint: Floats) -> Floats:
    return np.concatenate([[weights.sum()], weights @ joint])


def lengths(sums: Floats) -> Floats:
    """Acceptance lengths [...] of sums [..., 1 + K] of cycles and accepted tokens; NaN without a cycle."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 + sums[..., 1:].sum(axis=-1) / sums[..., 0]


def _bands(places: Any) -> Any:
    """The number of each place's band: 0 below 16 tokens, 1 below 32, 2 below 64, ..."""
    return np.floor(np.log2(np.maximum(places, _FIRST_BAND / 2) / (_FIRST_BAND / 2))).astype(np.int64)


def walk_figures(tally: Tally, drafted: Sequence[Drafted], datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of all answers, by dataset, partition, kind and place in the answer.

    datasets: by name their kind and partition. Native answers belong to no partition: nobody sampled them.
    """
    every = np.ones(len(tally.answers), dtype=bool)
    parts: dict[str, dict[str, Any]] = {"datasets": {}, "partitions": {}, "kinds": {}}
    labels: dict[str, list[str | None]] = defaultdict(list)
    for one in drafted:
        told = datasets[one.dataset]
        labels["datasets"].append(one.dataset)
        labels["partitions"].append(told["partition"] if told["kind"] == "prompts" else None)
        labels["kinds"].append(told["kind"])
    for part, names in labels.items():
        of_row = np.array(names, dtype=object)[tally.answers]
        for name in sorted({name for name in names if name is not None}):
            parts[part][name] = tally.figures(of_row == name)
    return {
        "all": tally.figures(every),
        **parts,
        "answer_position": [
            {
                "from": 0 if band == 0 else _FIRST_BAND << (band - 1),
                "to": _FIRST_BAND << band,
                **tally.figures(tally.bands == band),
            }
            for band in sorted(set(tally.bands.tolist()))
        ],
    }


def repetition_figures(drafted: Sequence[Drafted], tallies: Mapping[int, Tally]) -> dict[str, Any]:
    """How much answers repeat themselves, and greedy acceptance without those that end in a loop.

    Of an answer's runs of four tokens the share that differ, over all answers of a dataset.
    """
    distinct: dict[str, int] = defaultdict(int)
    runs: dict[str, int] = defaultdict(int)
    loops = []
    for one in drafted:
        tokens = one.tokens
        found = [tuple(tokens[start : start + RUN]) for start in range(len(tokens) - RUN + 1)]
        distinct[one.dataset] += len(set(found))
        runs[one.dataset] += len(found)
        loops.append(is_degenerate(tokens))
    without = {
        str(length): tally.figures(~np.array(loops, dtype=bool)[tally.answers])["acceptance_length"]
        for length, tally in tallies.items()
    }
    total = sum(runs.values())
    return {
        "n": RUN,
        "all": sum(distinct.values()) / total if total else None,
        "datasets": {name: distinct[name] / runs[name] if runs[name] else None for name in sorted(runs)},
        "answers": len(drafted),
        "degenerate_samples": sum(loops),
        "without_degenerate": without,
    }


def warnings(figures: Mapping[str, Any]) -> list[str]:
    """What a reader should know before trusting the figures, in words."""
    found = []
    walks = {length: walk["greedy"]["all"]["acceptance_length"] for length, walk in figures["walk"].items()}
    if all(length is None for length in walks.values()):
        found.append(
            "No held-out answer is long enough for one whole chain of drafts, so there is no acceptance "
            "length. Lower evaluation.draft_tokens or let the target answer at greater length."
        )
    repetition = figures["unique_ngrams"]
    for length, mean in walks.items():
        without = repetition["without_degenerate"][length]
        if mean is not None and without is not None and mean - without > _FLATTERY:
            found.append(
                f"{repetition['degenerate_samples']} of {repetition['answers']} answers end in a loop, which "
                f"is easy to draft and flatters the drafter: with {length} drafted the acceptance length is "
                f"{mean:.2f} with them and {without:.2f} without."
            )
    looping = [
        f"{name} {share:.0%}"
        for name, share in repetition["datasets"].items()
        if share is not None and share < _LOOPING
    ]
    if looping:
        found.append(
            f"Answers repeat themselves, which is easy to draft and flatters the drafter. Of their runs of "
            f"{RUN} tokens so many differ: {', '.join(looping)}."
        )
    return found
