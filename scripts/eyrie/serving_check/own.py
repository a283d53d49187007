"""Eyrie's own decoding of the same prompts, counted as a server counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyrie.decoding import DraftedOutput, speculative
from eyrie.held_out import HeldOutPrompt
from eyrie.measuring import load_pair
from eyrie.serving_check.counters import Counters, of_cycles


@dataclass(frozen=True)
class OwnAnswers:
    """Each prompt's tokens, and what was drafted and accepted in all."""

    token_ids: list[list[int]]
    counters: Counters


def decode_as_served(
    target_path: Path,
    checkpoint: Path,
    dtype: str,
    prompts: Sequence[HeldOutPrompt],
    max_new_tokens: int,
    draft_tokens: int,
) -> OwnAnswers:
    """Decode the prompts in this process with drafts of this length.

    A server drafts as many tokens near the end of an answer as anywhere, and counts what it accepts beyond
    max_new_tokens, though nobody gets to read it. So decoding goes on as far, and what is beyond is cut off.
    """
    target, drafter = load_pair(target_path, checkpoint, dtype)
    token_ids, accepted = [], []
    for prompt in prompts:
        output = speculative(target, drafter, prompt.prompt_ids, max_new_tokens + draft_tokens, draft_tokens)
        token_ids.append(output.token_ids[:max_new_tokens])
        accepted += accepted_until(output, max_new_tokens)
    return OwnAnswers(token_ids, of_cycles(accepted, draft_tokens))


def accepted_until(output: DraftedOutput, max_new_tokens: int) -> list[int]:
    """The accepted tokens of each cycle that begins before so many tokens are written."""
    # The prompt's own pass writes the first.
    written, found = 1, []
    for cycle in output.cycles:
        if written >= max_new_tokens:
            break
        found.append(cycle.accepted)
        written += cycle.accepted + 1
    return found
