"""The training-time test as the paper has it, written out in full: every position and mask, no shortcut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from eyrie.eagle3.batches import Sample
from eyrie.eagle3.model import Drafter, rotary, rotate


@dataclass(frozen=True)
class PlainStep:
    """One step over all T positions of a sample: logits [T, D], cross-entropy [T], and its weight, 0 or 1."""

    logits: torch.Tensor
    entropy: torch.Tensor
    weight: torch.Tensor


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Moved left by one, zeros entering on the right."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def plain_steps(
    drafter: Drafter,
    sample: Sample,
    head: torch.Tensor,
    steps: int,
    mask_shift: str = "aligned",
    position_mask: bool = True,
) -> list[PlainStep]:
    """The published unroll over one sample. head: the target's, [V, H]."""
    assert sample.last is not None
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    length = len(sample.token_ids)
    ids, distribution = shifted(sample.token_ids), shifted(sample.last.float() @ head.t())
    inside = shifted(torch.ones(length))
    mask = sample.loss_mask.float()
    for _ in range({"aligned": 2, "shifted": 1, "legacy": 0}[mask_shift]):
        mask = shifted(mask)
    hidden = sample.aux.float() @ drafter.fc.weight.t()
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    results = []
    for step in range(steps):
        embedding = norm(drafter.embedding[ids], layer.input_layernorm.weight)
        both = torch.cat([embedding, norm(hidden, layer.hidden_norm.weight)], dim=-1)
        cos, sin = rotary(torch.arange(length) + step, attention.head_dim, attention.theta)
        query = rotate((both @ attention.q_proj.weight.t()).view(length, attention.heads, -1), cos, sin)
        key = rotate((both @ attention.k_proj.weight.t()).view(length, attention.kv_heads, -1), cos, sin)
        value = (both @ attention.v_proj.weight.t()).view(length, attention.kv_heads, -1)
        groups = attention.heads // attention.kv_heads
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        # length x (step + 1) * length: a causal block, then a diagonal one for every later step.
        causal, diagonal = torch.ones(length, length).tril(), torch.eye(length)
        allowed = torch.cat([causal] + [diagonal] * step, dim=1).bool()
        scores = torch.einsum("qhd,khd->hqk", query, torch.cat(keys)) / attention.head_dim**0.5
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, torch.cat(values)).reshape(length, -1)
        hidden = hidden + mixed @ attention.o_proj.weight.t()
        normed = norm(hidden, layer.post_attention_layernorm.weight)
        gate = functional.silu(normed @ layer.mlp.gate_proj.weight.t())
        up = normed @ layer.mlp.up_proj.weight.t()
        hidden = hidden + (gate * up) @ layer.mlp.down_proj.weight.t()
        logits = norm(hidden, drafter.norm.weight) @ drafter.lm_head.weight.t()
        weight = mask * inside
        if position_mask:
            weight = weight * drafter.t2d[distribution.argmax(dim=-1)]
        soft = distribution[:, drafter.t2d].softmax(dim=-1)
        results.append(PlainStep(logits, -(soft * logits.log_softmax(dim=-1)).sum(-1), weight))
        ids, distribution = shifted(ids), shifted(distribution)
        inside, mask = shifted(inside), shifted(mask)
    return results


def plain_loss(
    results: Sequence[Sequence[PlainStep]], decay: float, normalisation: str = "supervised"
) -> torch.Tensor:
    """The loss of several samples' steps, normalised over them together."""
    total = torch.zeros(())
    for step, parts in enumerate(zip(*results, strict=True)):
        if normalisation == "positions":
            count = torch.tensor(float(sum(len(part.weight) for part in parts)))
        else:
            count = torch.stack([part.weight.sum() for part in parts]).sum()
        if count:
            total = total + decay**step * sum((part.entropy * part.weight).sum() for part in parts) / count
    return total
