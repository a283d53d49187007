"""The EAGLE-3 drafter: one Llama layer over the target's features and the next token's embedding.

Alignment, the same everywhere. At unroll step 0, position p takes the feature fc(aux_p) and the embedding of
token p + 1, and predicts token p + 2; the target's own distribution for it is head(last_{p+1}). At step i,
position p takes its own output of step i - 1, the embedding of token p + 1 + i, and predicts token
p + 2 + i. The rotary position is p + i. What a step hands to the next is the layer's output before the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class DrafterConfig:
    """The drafter's shape. layer_ids: the captured layers, as indices into Hugging Face's hidden_states."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_ids: tuple[int, ...]
    bos_token_id: int | None
    eos_token_id: int | list[int] | None


def rms_normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] divided by its root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Root mean square norm with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., size]."""
        return rms_normalise(x, self.eps) * self.weight


def rotary(position_ids: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [..., head_dim] for positions [...], in float32."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads x [..., heads, head_dim] by the angles [..., head_dim] of their positions."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos[..., None, :].to(x.dtype) + turned * sin[..., None, :].to(x.dtype)


class DraftCache:
    """Keys and values [B, kv_heads, length, head_dim] of the positions that the layer has seen."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """How many positions the cache holds."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [B, kv_heads, S, head_dim]; returns all that the cache now holds."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def crop(self, length: int) -> None:
        """Keep the first `length` positions."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


class Attention(nn.Module):
    """Grouped-query attention over [embedding, hidden], twice the model's width."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, cache: DraftCache) -> torch.Tensor:
        """Causal attention of x [B, S, 2H] over the cache and itself; returns [B, S, H]."""
        batch, new, _ = x.shape
        cos, sin = rotary(position_ids, self.head_dim, self.theta)
        queries = rotate(self.q_proj(x).view(batch, new, self.heads, self.head_dim), cos, sin)
        keys = rotate(self.k_proj(x).view(batch, new, self.kv_heads, self.head_dim), cos, sin)
        values = self.v_proj(x).view(batch, new, self.kv_heads, self.head_dim)
        before = cache.length
        keys, values = cache.append(keys.transpose(1, 2), values.transpose(1, 2))
        # The heads of one group are so many more queries of its one key head: no copy of the keys.
        groups = self.heads // self.kv_heads
        queries = queries.transpose(1, 2).reshape(batch, self.kv_heads, groups * new, self.head_dim)
        mask = torch.ones(new, before + new, dtype=torch.bool, device=x.device).tril(before)
        mixed = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask.repeat(groups, 1)
        )
        mixed = mixed.view(batch, self.heads, new, self.head_dim).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch, new, self.heads * self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] to [..., H]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The drafter's one decoder layer. Its residual is the incoming hidden state, not normed."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(size, eps)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor, cache: DraftCache
    ) -> torch.Tensor:
        """embeddings and hidden [B, S, H] to the next hidden states [B, S, H], before the final norm."""
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, position_ids, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """The drafter with the target's frozen embedding, which its state dict leaves out.

    token_ids: the draft vocabulary, D rising target ids. embedding: the target's, [V, H], any float dtype.
    The modules' names are those of the classic checkpoint.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    embedding: torch.Tensor

    def __init__(self, config: DrafterConfig, token_ids: Sequence[int], embedding: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(len(config.layer_ids) * config.target_hidden_size, size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", t2d)
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    def draft_token_ids(self) -> torch.Tensor:
        """The target ids [D] of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """The features [..., H] of captured layers side by side, [..., layers * target H]."""
        return self.fc(aux)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings [..., H] of target ids [...]."""
        return self.embedding[token_ids].to(self.fc.weight.dtype)

    def step(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DraftCache | None = None,
    ) -> torch.Tensor:
        """One causal pass of the layer after what the cache holds, whose keys and values are added to it.

        embeddings, hidden: [B, S, H]. position_ids: [B, S]. Returns [B, S, H], before the norm: the hidden
        states of the next step.
        """
        return self.midlayer(embeddings, hidden, position_ids, DraftCache() if cache is None else cache)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary [..., D] of hidden states [..., H]."""
        return self.lm_head(self.norm(hidden))

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of positions in the draft vocabulary."""
        return draft_ids + self.d2t[draft_ids]
