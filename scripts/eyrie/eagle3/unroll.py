"""The training-time test: the drafter fed its own states, with exact attention over the cached keys.

At step i a query at position p sees the step-0 keys of positions up to p, and of each later step j = 1..i
only the key of p itself: what it would have in its cache had it drafted i tokens after p. This is attention
under a mask of one causal block and i diagonal ones, without computing what the diagonal blocks mask out.

Two things are computed once for all steps. The embedding's half of the query, key and value products
depends on the token alone, not on the step; and since the embedding is frozen, the learnt scale of its
norm is folded into the weights, so that no gradient runs back to the tokens at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyrie.eagle3.batches import Layout
from eyrie.eagle3.flex import FlexAttention
from eyrie.eagle3.fused import Weight, gated_unit, product, rms_norm
from eyrie.eagle3.model import Drafter, RMSNorm, rms_normalise, rotary, rotate


@dataclass(frozen=True)
class _Chain:
    """Keys and values [Q, kv_heads, head_dim] of the queries at one step after step 0."""

    keys: torch.Tensor
    values: torch.Tensor


class Unroll:
    """One pass of the drafter over a layout: `first()`, then `next(...)` as often as there are steps.

    dtype: of the matrix products. flex: whether flex attention does the attention; None: on a GPU it does.
    All states are float32 [Q, H], in the order of the layout's queries.
    """

    def __init__(
        self,
        drafter: Drafter,
        layout: Layout,
        dtype: torch.dtype = torch.float32,
        flex: bool | None = None,
    ) -> None:
        layer, width = drafter.midlayer, drafter.config.hidden_size
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._drafter, self._layout = layer, drafter, layout
        projections = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        weight = torch.cat(projections)
        embedding_weight = weight[:, :width] * layer.input_layernorm.weight
        self._query_width = query = len(projections[0])
        self._fc = Weight(drafter.fc.weight, dtype)
        self._hidden = Weight(weight[:, width:], dtype)
        self._hidden_queries = Weight(weight[:query, width:], dtype)
        self._hidden_keys = Weight(weight[query:, width:], dtype)
        self._embedding = Weight(embedding_weight, dtype)
        self._embedding_keys = Weight(embedding_weight[query:], dtype)
        self._out = Weight(attention.o_proj.weight, dtype)
        self._mlp = [Weight(part.weight, dtype) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        flex = layout.aux.is_cuda if flex is None else flex
        self._flex = FlexAttention(layout, dtype) if flex else None
        self._masks = [] if flex else _causal_masks(layout, attention.heads // attention.kv_heads)
        self._turns = self._angle_table(len(layout.chain_rows))
        self._chain: list[_Chain] = []

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embedding's share of queries, keys and values [N, q + k + v] for tokens [N]."""
        return product(self._normed_embedding(token_ids), self._embedding)

    def _normed_embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return rms_normalise(self._drafter.embed(token_ids), self._layer.input_layernorm.eps)

    def first(self, embedded: torch.Tensor) -> torch.Tensor:
        """Step 0: fills the cache for all keys; returns the queries' states [Q, H].

        embedded: `embed` of the queries' next tokens.
        """
        layout, query = self._layout, self._query_width
        features = product(layout.aux, self._fc)
        normed = _norm(self._layer.hidden_norm, features)
        tokens = self._normed_embedding(layout.key_tokens)
        keys_values = product(normed, self._hidden_keys) + product(tokens, self._embedding_keys)
        keys, values = self._heads(keys_values).chunk(2, dim=1)
        self._keys = rotate(keys, *self._angles(layout.key_positions))
        self._values = values
        queries = product(_rows(normed, layout.query_rows), self._hidden_queries)
        queries = self._heads(queries + embedded[:, :query])
        return self._finish(
            _rows(features, layout.query_rows), rotate(queries, *self._angles(layout.query_positions))
        )

    def next(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The step after the states `hidden` [Q, H]; embedded: `embed` of the tokens it takes, [Q, ...]."""
        step = len(self._chain) + 1
        if step >= self._turns_steps:
            # A decoder takes more steps than the layout was made for.
            self._turns = self._angle_table(2 * step)
        angles = self._angles(self._layout.query_positions + step)
        normed = _norm(self._layer.hidden_norm, hidden)
        heads = self._heads(product(normed, self._hidden) + embedded)
        attention = self._layer.self_attn
        sizes = [attention.heads, attention.kv_heads, attention.kv_heads]
        queries, keys, values = torch.split(heads, sizes, dim=1)
        self._chain.append(_Chain(rotate(keys, *angles), values))
        return self._finish(hidden, rotate(queries, *angles))

    def _finish(self, hidden: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        hidden = hidden + product(self._attend(queries), self._out)
        norm = self._layer.post_attention_layernorm
        return gated_unit(hidden, norm.weight, norm.eps, *self._mlp)

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        """queries [Q, heads, head_dim] to the mixed values [Q, heads * head_dim].

        The step-0 block sample by sample, the diagonals for all queries at once.
        """
        if self._flex is not None:
            keys = [self._keys, *(step.keys for step in self._chain)]
            return self._flex(queries, keys, [self._values, *(step.values for step in self._chain)])
        layout, attention = self._layout, self._layer.self_attn
        kv, size = attention.kv_heads, attention.head_dim
        groups = attention.heads // kv
        queries, scale = queries.view(-1, kv, groups, size), size**-0.5
        own = [(queries * step.keys[:, :, None]).sum(-1) * scale for step in self._chain]
        diagonals = torch.stack(own, dim=-1) if own else queries.new_empty(*queries.shape[:-1], 0)
        mixed, weights = [], []
        for query, diagonal, sample_keys, sample_values, mask in zip(
            torch.split(queries, layout.query_counts),
            torch.split(diagonals, layout.query_counts),
            torch.split(self._keys, layout.key_counts),
            torch.split(self._values, layout.key_counts),
            self._masks,
            strict=True,
        ):
            # [kv, groups * q, ...]: the heads of a group are so many more queries of its key head.
            rows = query.permute(1, 2, 0, 3).reshape(kv, -1, size)
            sample_keys = sample_keys.permute(1, 2, 0)
            scores = torch.baddbmm(mask.expand(kv, -1, -1), rows, sample_keys, alpha=scale)
            scores = torch.cat([scores, diagonal.permute(1, 2, 0, 3).reshape(kv, len(mask), -1)], dim=-1)
            probability = scores.softmax(dim=-1)
            block = probability[..., : len(sample_values)] @ sample_values.transpose(0, 1)
            mixed.append(block.view(kv, groups, -1, size).permute(2, 0, 1, 3))
            diagonal_weight = probability[..., len(sample_values) :]
            weights.append(diagonal_weight.view(kv, groups, len(query), -1).permute(2, 0, 1, 3))
        output = torch.cat(mixed)
        if self._chain:
            weight = torch.cat(weights)
            for index, step in enumerate(self._chain):
                output = output + weight[..., index, None] * step.values[:, :, None]
        return output.reshape(len(queries), -1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self._layer.self_attn.head_dim)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._turns
        return cos[positions], sin[positions]

    def _angle_table(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions that so many steps reach."""
        attention, layout = self._layer.self_attn, self._layout
        self._turns_steps = steps
        positions = torch.arange(max(layout.key_counts) + steps, device=layout.aux.device)
        return rotary(positions, attention.head_dim, attention.theta)


def _norm(module: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, module.weight, module.eps)


def _rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for different rows; where they are all of x in order, x itself."""
    return x if len(rows) == len(x) else x.index_select(0, rows)


def _causal_masks(layout: Layout, groups: int) -> list[torch.Tensor]:
    """For each sample [groups * q, k]: 0 where a query may look, minus infinity at later positions."""
    masks = []
    for positions, keys in zip(
        torch.split(layout.query_positions, layout.query_counts), layout.key_counts, strict=True
    ):
        later = torch.arange(keys, device=positions.device) > positions[:, None]
        mask = torch.zeros(later.shape, device=later.device).masked_fill(later, -torch.inf)
        masks.append(mask.repeat(groups, 1))
    return masks


def unroll(
    drafter: Drafter, layout: Layout, dtype: torch.dtype = torch.float32, flex: bool | None = None
) -> list[torch.Tensor]:
    """The states [Q, H] of every step of the layout, fed with the samples' own tokens."""
    run = Unroll(drafter, layout, dtype, flex)
    embedded = run.embed(layout.chain_tokens)
    states = [run.first(embedded.index_select(0, layout.chain_rows[0]))]
    for rows in layout.chain_rows[1:]:
        states.append(run.next(states[-1], embedded.index_select(0, rows)))
    return states
