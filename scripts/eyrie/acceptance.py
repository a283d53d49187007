"""The arithmetic of acceptance: what the cycles of drafted decoding say about a drafter.

A cycle is one pass of the target over drafted tokens. It accepts the longest prefix of the draft that the
target would have written itself, and adds one token of the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Cycle:
    """One draft and its verification: how many tokens were offered, and how many accepted and written.

    Where an accepted token ends the answer, the accepted tokens after it don't count: nobody reads them.
    """

    offered: int
    accepted: int


def full_cycles(cycles: Sequence[Cycle], draft_tokens: int) -> list[Cycle]:
    """The cycles that were offered `draft_tokens` tokens.

    Cycles fall short only next to max_new_tokens, where fewer tokens are left to write. They would understate
    the drafter for no fault of its own, and are left out of all figures.
    """
    return [cycle for cycle in cycles if cycle.offered == draft_tokens]


def acceptance_length(cycles: Sequence[Cycle], draft_tokens: int) -> float | None:
    """Mean of accepted tokens + 1 over the full cycles, as vLLM and SGLang count; None without one."""
    full = full_cycles(cycles, draft_tokens)
    return 1 + sum(cycle.accepted for cycle in full) / len(full) if full else None


def acceptance_by_position(cycles: Sequence[Cycle], draft_tokens: int) -> list[float]:
    """For each drafted position, the share of full cycles that accepted it and thus all before it.

    Their sum + 1 is the acceptance length. Empty without a full cycle.
    """
    full = full_cycles(cycles, draft_tokens)
    if not full:
        return []
    return [
        sum(cycle.accepted >= position for cycle in full) / len(full)
        for position in range(1, draft_tokens + 1)
    ]


def predicted_speed_up(length: float, draft_tokens: int, draft_cost: float, verify_cost: float) -> float:
    """Speed-up over plain decoding: length / (draft_tokens * draft_cost + verify_cost).

    Costs are in plain steps: of drafting one token, and of verifying draft_tokens + 1 tokens in one pass.
    """
    return length / (draft_tokens * draft_cost + verify_cost)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position at which two token sequences differ, the end of one included; None if equal."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def distinct_bigrams(token_ids: Sequence[int]) -> float:
    """The share of a text's token pairs that differ; an answer caught in a loop has few.

    Loops are easy to draft, so a low share says that an acceptance length flatters the drafter.
    """
    pairs = list(pairwise(token_ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0
