"""Chains drafted from many positions of stored samples at once: the drafter fed its own tokens and states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from eyrie.eagle3.batches import Sample, lay_out
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.moving import moved
from eyrie.eagle3.unroll import Unroll, unroll

# What is computed, and in memory, at once: so many rows, fewer where they are long.
_ROWS_AT_ONCE = 8
_TOKENS_AT_ONCE = 1 << 14
# Places whose distributions over the whole vocabulary exist at once.
_PLACES_AT_ONCE = 512


def grouped(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """The samples in their order, in groups small enough to be computed at once."""
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        length = len(sample.token_ids)
        if group and (len(group) == _ROWS_AT_ONCE or tokens + length > _TOKENS_AT_ONCE):
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += length
    if group:
        yield group


def likeliest(drafter: Drafter, hidden: torch.Tensor) -> torch.Tensor:
    """The target's ids [Q] of what the drafter proposes first after states [Q, H]."""
    return drafter.to_target_ids(drafter.draft_logits(hidden).argmax(dim=-1))


@torch.inference_mode()
def draft_greedily(
    drafter: Drafter, samples: Sequence[Sample], starts: Sequence[torch.Tensor], draft_tokens: int
) -> list[torch.Tensor]:
    """For each sample [N, draft_tokens]: the target's ids of the chains drafted from its N start positions.

    starts: rising, not empty. The chain of position p follows token p + 1; only that token is the sample's.
    """
    layout = moved(lay_out(samples, starts, 1), drafter.embedding.device)
    run = Unroll(drafter, layout)
    hidden = run.first(run.embed(layout.chain_tokens)[layout.chain_rows[0]])
    chain = [likeliest(drafter, hidden)]
    while len(chain) < draft_tokens:
        hidden = run.next(hidden, run.embed(chain[-1]))
        chain.append(likeliest(drafter, hidden))
    return list(torch.split(torch.stack(chain, dim=1).cpu(), layout.query_counts))


@torch.inference_mode()
def overlaps(
    drafter: Drafter,
    samples: Sequence[Sample],
    starts: Sequence[torch.Tensor],
    draft_tokens: int,
    head: torch.Tensor,
) -> list[torch.Tensor]:
    """For each sample [N, draft_tokens]: how probable it is that a token drafted by sampling is accepted.

    That is the sum over all tokens of min(p, q), at temperature 1, of the target's and the drafter's
    probabilities (Leviathan et al. 2023); q is 0 outside the draft vocabulary. Later tokens of a chain are
    judged where those before were accepted and are the sample's own: the drafter goes on with its own
    states, and p is that of the stored text. 0 where the sample ends. head: the target's, [V, H] float32;
    unused where top tokens are stored.
    """
    device = drafter.embedding.device
    states = unroll(drafter, moved(lay_out(samples, starts, draft_tokens), device))
    ends = torch.tensor([len(sample.token_ids) for sample in samples]).cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    # Among all the samples' rows: about what step i proposes the target's state at `first + i` tells, which
    # must lie before the sample's last row.
    first = torch.cat([start + begin + 1 for start, begin in zip(starts, begins, strict=True)])
    last = torch.cat([torch.full_like(start, end - 2) for start, end in zip(starts, ends, strict=True)])
    rows = first[:, None] + torch.arange(draft_tokens)
    inside = rows <= last[:, None]
    found = torch.zeros(rows.shape)
    for chunk in torch.split(torch.unique(rows[inside]), _PLACES_AT_ONCE):
        target = _probabilities(drafter, samples, chunk, head)
        for step, hidden in enumerate(states):
            row = rows[:, step]
            here = (inside[:, step] & (row >= chunk[0]) & (row <= chunk[-1])).nonzero()[:, 0]
            drafted = drafter.draft_logits(hidden[here.to(device)]).softmax(dim=-1)
            index = torch.searchsorted(chunk, row[here]).to(device)
            found[here, step] = torch.minimum(drafted, target[index]).sum(dim=-1).cpu()
    return list(torch.split(found, [len(start) for start in starts]))


def _probabilities(
    drafter: Drafter, samples: Sequence[Sample], rows: torch.Tensor, head: torch.Tensor
) -> torch.Tensor:
    """What the target gives to the draft vocabulary's tokens [N, D] after these of all the samples' rows.

    From the last state as parts of the whole vocabulary's sum; stored top tokens are parts of the draft
    vocabulary's, and the others count as 0.
    """
    device = drafter.embedding.device
    lasts = [sample.last for sample in samples if sample.last is not None]
    if len(lasts) == len(samples):
        logits = torch.cat(lasts)[rows].to(device).float() @ head.t()
        return logits.softmax(dim=-1)[:, drafter.draft_token_ids()]
    tops = [sample.top for sample in samples if sample.top is not None]
    ids = torch.cat([top.ids for top in tops])[rows].to(device)
    logs = torch.cat([top.logs for top in tops])[rows].to(device)
    nothing = torch.zeros(len(rows), len(drafter.d2t), device=device)
    return nothing.scatter(1, ids.long(), logs.float().exp())
