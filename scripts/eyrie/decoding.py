"""Greedy decoding of one prompt, plain and with a drafter: the reference that measures acceptance.

Drafted decoding writes what plain decoding writes, token for token, whatever the drafter proposes: every
token comes out of the target's own argmax. (In bfloat16 passes over one and over several tokens round
differently, and near-ties may fall the other way.)

One cycle of drafted decoding, with `n` tokens newly verified by the cycle before (or by the prompt):

1. The drafter takes the target's features of these n positions. Position p sees the features at p and the
   embedding of the token at p + 1; the last one's output predicts the token after the newest.
2. From there it goes on alone, fed with its own tokens and states, until `draft_tokens` are drafted. These
   steps' keys and values are then dropped, since they stem from its own states.
3. The target passes over the newest token and the drafts at once. Drafts that agree with its argmax are
   accepted up to the first that doesn't; then comes the target's own token, which is the newest of the
   next cycle. Rejected tokens leave the target's cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from eyrie.acceptance import Cycle
from eyrie.eagle3.model import DraftCache, Drafter
from eyrie.target import Target


@dataclass(frozen=True)
class PlainOutput:
    """Tokens that the target wrote alone, the final end-of-sequence token included.

    margins: at each token the distance of the two highest logits, where asked for.
    """

    token_ids: list[int]
    margins: list[float]


@dataclass(frozen=True)
class DraftedOutput:
    """Tokens written with a drafter; `from_drafter` says of each whether it was drafted and accepted.

    refused: the drafts that the target did not take, by the place in token_ids that it filled itself instead.
    """

    token_ids: list[int]
    from_drafter: list[bool]
    cycles: list[Cycle]
    refused: dict[int, list[int]] = field(default_factory=dict)


class TargetPass:
    """The target on one sequence: its cache, and one pass after another."""

    def __init__(self, target: Target, rewinds: bool) -> None:
        self._target = target
        self._cache = target.new_cache()
        if rewinds:
            # Layers with a window then keep what they would drop until `forget` has had its say.
            self._cache.activate_past_recording()
        self.device = target.embedding_weight().device

    def read(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass over the sequence's next tokens; returns aux [1, n, 3H] and last [n, H]."""
        states = self._target.forward(torch.tensor([token_ids], device=self.device), self._cache)
        return states.aux, states.last[0]

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """The logits [n, vocabulary] of states [n, H]."""
        return self._target.logits(last)

    def forget(self, tokens: int) -> None:
        """Drop the cache's last `tokens` positions; call it after every pass, with 0 too, if `rewinds`."""
        self._cache.crop(-tokens)


class DraftPass:
    """The drafter on one sequence: its cache holds the verified positions alone."""

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self._drafter = drafter
        self._device = device
        self._cache = DraftCache()
        self._verified = 0

    @torch.inference_mode()
    def draft(self, aux: torch.Tensor, following: Sequence[int], count: int) -> list[int]:
        """Take in newly verified positions, then draft `count` (at least 1) tokens after the newest.

        aux: the target's features of these positions [1, n, 3H]. following: the token after each of them, so
        the last is the newest, which the target has not passed over yet.
        """
        drafter, start = self._drafter, self._verified
        self._verified += len(following)
        tokens = torch.tensor([following], device=self._device)
        positions = torch.arange(start, self._verified, device=self._device)[None]
        hidden = drafter.step(drafter.embed(tokens), drafter.project(aux), positions, self._cache)[:, -1:]
        drafts = [self._best_token(hidden)]
        for position in range(self._verified, self._verified + count - 1):
            positions = torch.tensor([[position]], device=self._device)
            hidden = drafter.step(drafter.embed(drafts[-1]), hidden, positions, self._cache)
            drafts.append(self._best_token(hidden))
        self._cache.crop(self._verified)
        return torch.cat(drafts, dim=1)[0].tolist()

    def _best_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's id [1, 1] of the likeliest token in the draft vocabulary."""
        return self._drafter.to_target_ids(self._drafter.draft_logits(hidden).argmax(dim=-1))


@torch.inference_mode()
def greedy(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int, with_margins: bool = False
) -> PlainOutput:
    """Decode with the target alone, one token a step, until it ends the answer or max_new_tokens (>= 1)."""
    ends = frozenset(target.eos_ids())
    reader = TargetPass(target, rewinds=False)
    output: list[int] = []
    margins: list[float] = []
    unread = list(prompt_ids)
    while len(output) < max_new_tokens and not (output and output[-1] in ends):
        _, last = reader.read(unread)
        logits = reader.logits(last[-1:])
        unread = [int(logits.argmax())]
        output += unread
        if with_margins:
            best, second = logits[0].float().topk(2).values.tolist()
            margins.append(best - second)
    return PlainOutput(output, margins)


@torch.inference_mode()
def speculative(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], max_new_tokens: int, draft_tokens: int
) -> DraftedOutput:
    """Decode with chains of `draft_tokens` drafted tokens, until the answer ends or max_new_tokens (>= 1).

    Near max_new_tokens a cycle is offered only as many drafts as could be written.
    """
    ends = frozenset(target.eos_ids())
    reader = TargetPass(target, rewinds=True)
    chain = DraftPass(drafter, reader.device)
    aux, last = reader.read(prompt_ids)
    output = [int(reader.logits(last[-1:]).argmax())]
    from_drafter = [False]
    cycles: list[Cycle] = []
    refused: dict[int, list[int]] = {}
    following = [*prompt_ids[1:], *output]
    while len(output) < max_new_tokens and output[-1] not in ends:
        # The target's own token needs a place, too.
        offered = min(draft_tokens, max_new_tokens - len(output) - 1)
        drafts = chain.draft(aux, following, offered) if offered else []
        aux, last = reader.read([output[-1], *drafts])
        choices = reader.logits(last).argmax(dim=-1).tolist()
        agreed = _agreeing(drafts, choices)
        reader.forget(offered - agreed)
        aux, following = aux[:, : agreed + 1], choices[: agreed + 1]
        written = _until_end(following, ends)
        accepted = min(agreed, len(written))
        cycles.append(Cycle(offered, accepted))
        if accepted < len(written) and drafts[accepted:]:
            refused[len(output) + accepted] = drafts[accepted:]
        output += written
        from_drafter += [position < accepted for position in range(len(written))]
    return DraftedOutput(output, from_drafter, cycles, refused)


def _agreeing(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """How many drafts from the first on are what the target chose there."""
    return next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))


def _until_end(token_ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens up to the first that ends an answer, that one included."""
    stop = next((i + 1 for i, token in enumerate(token_ids) if token in ends), len(token_ids))
    return list(token_ids[:stop])
