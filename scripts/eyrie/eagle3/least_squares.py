"""The drafter that least squares fit to the target's states, to start training from.

How the target's state moves from one position to the next is, to a good part, linear in the state and the
next token's embedding: the best linear prediction is right about as often as a drafter after a whole pass
over a small dataset. So the linear part is solved for, and gradient descent starts from there. With y the
target's last state before the scale of its final norm, p a position and e the embedding of token p + 1:

* fc is the best linear reading of y_p in the captured layers. The layer is then fed with the same quantity
  at step 0 as at later steps, where it gets its own output.
* Attention adds the best y_{p+1} - y_p that is linear in the layer's two normed inputs and has the rank of
  the values: reduced-rank regression (Izenman, 1975), in the metric of the logits. Queries and keys of most
  heads are one random projection of e, so that a position looks at itself; one head of each group starts
  with little to say and is free to look elsewhere.
* The MLP's down projection is fitted to what is left, on the features of the target's own last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyrie.config import ConfigError
from eyrie.eagle3.batches import Sample
from eyrie.eagle3.model import Drafter

# More positions than this make no better fit and take more memory: 14 KB each for a width of 576.
_MOST_POSITIONS = 50_000
# What the loss mask supervises counts so much more than the rest of a sample.
_SUPERVISED_WEIGHT = 3.0
# Ridge terms, as shares of the mean square of the regressors.
_RIDGE, _RIDGE_OF_FEATURES, _RIDGE_OF_MLP = 1e-3, 1e-4, 1e-2
# Typical size of fc's weights; it sets the scale of the residual stream, and so how far a step of training
# moves it.
_FEATURE_WEIGHT = 0.02
# A head that looks at its own position scores it so high, and over some hundred positions gives it about this
# share of its attention.
_SELF_SCORE, _SELF_ATTENTION = 8.0, 0.9


@dataclass(frozen=True)
class _Positions:
    """N positions: captured layers [N, layers * H], the next token's embedding, y there and one further."""

    aux: torch.Tensor
    embedding: torch.Tensor
    here: torch.Tensor
    there: torch.Tensor
    weight: torch.Tensor
    """[N, 1]: roots of how much a position counts."""

    def ridge(self, x: torch.Tensor, y: torch.Tensor, share: float) -> torch.Tensor:
        """The weighted least-squares map [in, out] from x [N, in] to y [N, out], shrunk by a share."""
        x = x * self.weight
        gram = x.t() @ x
        gram.diagonal().add_(share * gram.diagonal().mean())
        return torch.linalg.solve(gram, x.t() @ (y * self.weight))


@torch.no_grad()
def initialise_by_least_squares(
    drafter: Drafter,
    samples: Sequence[Sample],
    head_rows: torch.Tensor,
    seed: int,
    lengths: Sequence[int] | None = None,
) -> None:
    """Replace fc, attention and the down projection by what fits the samples.

    Call it after initialise_from_target, whose norm, head, gate and up projections stay. head_rows: [D, H],
    the target head's rows of the draft vocabulary. lengths: the samples' tokens, where they are known without
    reading a sample; each sample is then read once at most. Raises ConfigError for samples without last
    states.
    """
    layer, width = drafter.midlayer, drafter.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    positions = _gather(drafter, samples, generator, lengths)

    # The captured layers differ a thousandfold in size; a ridge must not favour the large ones.
    sizes = positions.aux.view(-1, len(drafter.config.layer_ids), width).square().mean((0, 2)).sqrt()
    sizes = sizes.repeat_interleave(width)
    reading = positions.ridge(positions.aux / sizes, positions.here, _RIDGE_OF_FEATURES) / sizes[:, None]
    scale = _FEATURE_WEIGHT / reading.square().mean().sqrt()
    features = positions.aux @ reading * scale
    drafter.fc.weight.copy_(reading.t() * scale)

    layer.hidden_norm.weight.fill_(1.0)
    layer.input_layernorm.weight.fill_(1.0)
    inputs = torch.cat([layer.input_layernorm(positions.embedding), layer.hidden_norm(features)], dim=-1)
    wanted = positions.there * scale
    metric = _logit_metric(head_rows * drafter.norm.weight)
    values, outputs = _reduced_rank(
        positions, inputs, wanted - features, metric, len(layer.self_attn.v_proj.weight)
    )
    _look_at_itself(drafter, values, outputs, generator)

    hidden = features + inputs @ values.t() @ outputs.t()
    normed = layer.post_attention_layernorm(hidden)
    gated = torch.nn.functional.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed)
    layer.mlp.down_proj.weight.copy_(positions.ridge(gated, wanted - hidden, _RIDGE_OF_MLP).t())


def _gather(
    drafter: Drafter,
    samples: Sequence[Sample],
    generator: torch.Generator,
    lengths: Sequence[int] | None = None,
) -> _Positions:
    """All positions that have one before and one after them, or a random part of very many."""
    if lengths is None:
        lengths = [len(sample.token_ids) for sample in samples]
    counts = torch.tensor([length - 1 for length in lengths])
    keep = torch.ones(int(counts.sum()), dtype=torch.bool)
    if len(keep) > _MOST_POSITIONS:
        keep[torch.randperm(len(keep), generator=generator)[_MOST_POSITIONS:]] = False
    # A state says nothing where the norm's scale is zero.
    scales = drafter.norm.weight
    norm = torch.where(scales.abs() < 1e-6, 1.0, scales)
    parts: list[list[torch.Tensor]] = [[] for _ in range(5)]
    for index, kept in enumerate(torch.split(keep, counts.tolist())):
        if not kept.any():
            continue
        sample = samples[index]
        if sample.last is None:
            raise ConfigError(
                "training.initialise: saw least_squares, which fits the target's last states, but the store "
                "holds its top tokens instead; expected target_layer or random, or "
                "hidden_states.top_tokens: null"
            )
        place = 1 + kept.nonzero()[:, 0]
        following = torch.cat([sample.loss_mask[1:], sample.loss_mask[-1:]])[place]
        parts[0].append(sample.aux[place - 1].float())
        parts[1].append(drafter.embed(sample.token_ids[place]))
        parts[2].append(sample.last[place - 1].float() / norm)
        parts[3].append(sample.last[place].float() / norm)
        parts[4].append(torch.where(following, _SUPERVISED_WEIGHT, 1.0).sqrt()[:, None])
    return _Positions(*(torch.cat(part) for part in parts))


def _logit_metric(head: torch.Tensor) -> torch.Tensor:
    """The symmetric root [H, H] of head.T @ head / D: lengths after it are those of differences of logits."""
    gram = head.t() @ head / len(head)
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    roots, vectors = torch.linalg.eigh(gram)
    return vectors @ torch.diag(roots.clamp(min=0).sqrt()) @ vectors.t()


def _reduced_rank(
    positions: _Positions, x: torch.Tensor, y: torch.Tensor, metric: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best map from x to y of that rank as two factors of one size, [rank, in] and [out, rank].

    The full map's predictions are projected on their principal directions in the metric.
    """
    full = positions.ridge(x, y, _RIDGE) @ metric
    predicted = x @ full
    _, vectors = torch.linalg.eigh(predicted.t() @ predicted)
    directions = vectors[:, -rank:].flip(1)
    inner, outer = (full @ directions).t(), torch.linalg.solve(metric, directions)
    balance = (outer.square().mean() / inner.square().mean()) ** 0.25
    return inner * balance, outer / balance


def _look_at_itself(
    drafter: Drafter, values: torch.Tensor, outputs: torch.Tensor, generator: torch.Generator
) -> None:
    """Attention that adds outputs @ values @ inputs of the own position; see the head of this file."""
    attention, width = drafter.midlayer.self_attn, drafter.config.hidden_size
    size, groups = attention.head_dim, attention.heads // attention.kv_heads
    heads = max(1, groups - 1)
    # The strongest directions are dealt to the key heads in turn.
    dealt = torch.arange(len(values)).view(size, attention.kv_heads).t()
    small = 0.1 * outputs.square().mean().sqrt()
    attention.v_proj.weight.copy_(values[dealt.reshape(-1)])
    attention.q_proj.weight.copy_(0.02 * torch.randn(attention.q_proj.weight.shape, generator=generator))
    attention.k_proj.weight.copy_(0.005 * torch.randn(attention.k_proj.weight.shape, generator=generator))
    attention.o_proj.weight.copy_(small * torch.randn(attention.o_proj.weight.shape, generator=generator))
    for group in range(attention.kv_heads):
        keys = attention.k_proj.weight[group * size : (group + 1) * size]
        # Rows of length one make the score the root of the head's size.
        rows_of_length_one = torch.randn(size, width, generator=generator) / width**0.5
        keys[:, :width] += rows_of_length_one * (_SELF_SCORE / size**0.5) ** 0.5
        for head in range(group * groups, group * groups + heads):
            rows = slice(head * size, (head + 1) * size)
            attention.q_proj.weight[rows] = keys
            attention.o_proj.weight[:, rows] = outputs[:, dealt[group]] / (heads * _SELF_ATTENTION)
