"""The gathered loss against the published algorithm written out in full, and where gradients fall."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from eyrie.config import TrainingSettings
from eyrie.eagle3.batches import Sample, candidate_places, make_batch, target_choices
from eyrie.eagle3.loss import unrolled_loss
from eyrie.eagle3.model import DraftCache, Drafter, rotary, rotate
from eyrie.eagle3.unroll import Unroll, unroll
from tiny_eagle3 import HIDDEN, VOCABULARY, random_drafter, random_sample

STEPS, DECAY = 4, 0.7


@pytest.fixture(scope="module")
def head() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Moved left by one, zeros entering on the right."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def dense_losses(
    drafter: Drafter, sample: Sample, head: torch.Tensor, mask_shift: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The published training-time test over all positions of one sample: each step's sum and count."""
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    length = len(sample.token_ids)
    ids, distribution = shifted(sample.token_ids), shifted(sample.last.float() @ head.t())
    inside = shifted(torch.ones(length))
    mask = sample.loss_mask.float()
    if mask_shift == "aligned":
        mask = shifted(shifted(mask))
    hidden = sample.aux.float() @ drafter.fc.weight.t()
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    results = []
    for step in range(STEPS):
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
        position_mask = mask * inside * drafter.t2d[distribution.argmax(dim=-1)]
        soft = distribution[:, drafter.t2d].softmax(dim=-1)
        entropy = -(soft * logits.log_softmax(dim=-1)).sum(-1)
        results.append(((entropy * position_mask).sum(), position_mask.sum()))
        ids, distribution = shifted(ids), shifted(distribution)
        inside, mask = shifted(inside), shifted(mask)
    return results


def dense_loss(
    drafter: Drafter, samples: Sequence[Sample], head: torch.Tensor, mask_shift: str
) -> torch.Tensor:
    every = [dense_losses(drafter, sample, head, mask_shift) for sample in samples]
    total = torch.zeros(())
    for step in range(STEPS):
        count = sum(result[step][1] for result in every)
        if count:
            total = total + DECAY**step * sum(result[step][0] for result in every) / count
    return total


def gathered_loss(
    drafter: Drafter,
    samples: Sequence[Sample],
    head: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    places = [sample.supervised(drafter.t2d) for sample in samples]
    used = [index for index, place in enumerate(places) if len(place)]
    batch = make_batch([samples[i] for i in used], [places[i] for i in used], STEPS)
    return unrolled_loss(drafter, batch, head[drafter.t2d], TrainingSettings(step_decay=DECAY), dtype)


def gradients(drafter: Drafter, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


MASKS = [
    [0] * 9 + [1] * 14,
    [0] * 3 + [1] * 5 + [0] * 4 + [1] * 6 + [0] * 2,
    [1] * 8,
    [0] * 12 + [1],
]


@pytest.mark.parametrize("mask_shift", ["aligned", "legacy"])
def test_loss_and_all_gradients_are_those_of_the_dense_algorithm(head: torch.Tensor, mask_shift: str) -> None:
    drafter = random_drafter(draft_vocabulary=60)
    samples = [random_sample(seed, mask, head, mask_shift) for seed, mask in enumerate(MASKS)]
    dense = dense_loss(drafter, samples, head, mask_shift)
    expected = gradients(drafter, dense)
    gathered = gathered_loss(drafter, samples, head)
    found = gradients(drafter, gathered)
    torch.testing.assert_close(gathered, dense, rtol=1e-5, atol=1e-5)
    assert expected.keys() == found.keys() and len(found) == 13
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@settings(max_examples=25, deadline=None)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=14), min_size=1, max_size=3),
    mask_shift=st.sampled_from(["aligned", "legacy"]),
    seed=st.integers(0, 50),
)
def test_any_mask_gives_the_dense_loss(masks: list[list[int]], mask_shift: str, seed: int) -> None:
    head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))
    drafter = random_drafter(seed)
    samples = [random_sample(seed + 1 + index, mask, head, mask_shift) for index, mask in enumerate(masks)]
    if not any(len(sample.supervised(drafter.t2d)) for sample in samples):
        return
    torch.testing.assert_close(
        gathered_loss(drafter, samples, head),
        dense_loss(drafter, samples, head, mask_shift),
        rtol=1e-4,
        atol=1e-5,
    )


def test_bfloat16_products_come_near_the_float32_loss(head: torch.Tensor) -> None:
    drafter = random_drafter()
    samples = [random_sample(seed, mask, head) for seed, mask in enumerate(MASKS[:2])]
    exact = gathered_loss(drafter, samples, head)
    near = gathered_loss(drafter, samples, head, torch.bfloat16)
    assert near.dtype == torch.float32 and near.item() != exact.item()
    torch.testing.assert_close(near, exact, rtol=3e-2, atol=0.0)


def first_step_positions(mask: list[int], head: torch.Tensor, steps: int) -> list[int]:
    """The positions whose step-0 prediction has a loss."""
    sample = random_sample(3, mask, head)
    batch = make_batch([sample], [sample.candidates], steps)
    positions = batch.layout.query_positions
    return positions[batch.step_queries[0]].tolist()


def test_aligned_learns_every_answer_token_and_nothing_past_the_end(head: torch.Tensor) -> None:
    drafter = random_drafter(draft_vocabulary=VOCABULARY)
    prompt, answer = 5, 4
    mask = [0] * prompt + [1] * answer
    # Position p predicts token p + 2 at step 0: tokens 5..8 are learnt at positions 3..6.
    assert first_step_positions(mask, head, 1) == [3, 4, 5, 6]
    sample = random_sample(3, mask, head)
    for token in range(len(mask)):
        changed = sample.last.clone()
        changed[token] = -changed[token]
        moved = Sample(**{**sample.__dict__, "last": changed})
        first, second = (gathered_loss(drafter, [s], head).item() for s in (sample, moved))
        # The state of token q is what the target predicts token q + 1 from.
        assert (first != second) == (prompt - 1 <= token < prompt + answer - 1), token


def test_legacy_leaves_out_the_first_predictions_and_learns_past_the_end() -> None:
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0], dtype=torch.bool)
    # Place q predicts token q + 1; answer tokens are 3, 4 and 5.
    assert candidate_places(mask, "aligned").tolist() == [2, 3, 4]
    assert candidate_places(mask, "legacy").tolist() == [4, 5, 6]


def test_the_first_token_can_be_supervised_only_with_a_feature_before_it() -> None:
    assert candidate_places(torch.ones(5, dtype=torch.bool), "aligned").tolist() == [1, 2, 3]


@pytest.mark.parametrize("rows", [1, 3, 512])
def test_choices_are_the_argmax_over_the_whole_vocabulary(head: torch.Tensor, rows: int) -> None:
    wide = torch.cat([head] * 100)  # more than one piece, and every maximum a hundredfold tie
    states = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = torch.cat(list(target_choices(states, wide, rows)))
    assert (found == (states.float() @ head.t()).argmax(dim=-1)).all()


def test_cached_steps_are_the_steps_of_training(head: torch.Tensor) -> None:
    """Draft from each query with `step` and a cache, as a decoder does; training saw the same states."""
    drafter = random_drafter()
    sample = random_sample(1, [0] * 4 + [1] * 8, head)
    batch = make_batch([sample], [sample.candidates], 3)
    trained = unroll(drafter, batch.layout)
    ids = sample.token_ids
    with torch.no_grad():
        features = drafter.project(sample.aux.float())
        for row, position in enumerate(batch.layout.query_positions.tolist()):
            cache = DraftCache()
            embeddings = drafter.embed(ids[1 : position + 2])[None]
            positions = torch.arange(position + 1)[None]
            hidden = drafter.step(embeddings, features[None, : position + 1], positions, cache)[:, -1:]
            torch.testing.assert_close(hidden[0, 0], trained[0][row], rtol=1e-4, atol=1e-5)
            for step in (1, 2):
                if position + 1 + step >= len(ids):
                    break
                embeddings = drafter.embed(ids[position + 1 + step].view(1, 1))
                hidden = drafter.step(embeddings, hidden, torch.tensor([[position + step]]), cache)
                torch.testing.assert_close(hidden[0, 0], trained[step][row], rtol=1e-4, atol=1e-5)
            assert cache.length == position + 1 + min(2, len(ids) - 2 - position)


def test_a_cropped_cache_forgets(head: torch.Tensor) -> None:
    drafter = random_drafter()
    generator = torch.Generator().manual_seed(2)
    embeddings, hidden = torch.randn(2, 1, 6, HIDDEN, generator=generator)
    positions = torch.arange(6)[None]
    with torch.no_grad():
        whole = drafter.step(embeddings, hidden, positions)
        cache = DraftCache()
        drafter.step(embeddings[:, :3], hidden[:, :3], positions[:, :3], cache)
        drafter.step(hidden[:, :2], embeddings[:, :2], positions[:, 3:5], cache)
        cache.crop(3)
        assert cache.length == 3
        rest = drafter.step(embeddings[:, 3:], hidden[:, 3:], positions[:, 3:], cache)
    torch.testing.assert_close(rest, whole[:, 3:], rtol=1e-4, atol=1e-5)


def test_samples_do_not_see_one_another(head: torch.Tensor) -> None:
    drafter = random_drafter()
    samples = [random_sample(seed, mask, head) for seed, mask in enumerate(MASKS[:3])]
    places = [sample.candidates for sample in samples]
    together = unroll(drafter, make_batch(samples, places, 3).layout)
    alone = [unroll(drafter, make_batch([s], [p], 3).layout) for s, p in zip(samples, places, strict=True)]
    for step in range(3):
        torch.testing.assert_close(
            together[step], torch.cat([states[step] for states in alone]), rtol=1e-4, atol=1e-5
        )


def test_unrolling_step_by_step_with_the_same_tokens_is_unroll(head: torch.Tensor) -> None:
    drafter = random_drafter()
    sample = random_sample(4, MASKS[0], head)
    layout = make_batch([sample], [sample.candidates], 2).layout
    run = Unroll(drafter, layout)
    hidden = run.first(run.embed(layout.chain_tokens[layout.chain_rows[0]]))
    hidden = run.next(hidden, run.embed(layout.chain_tokens[layout.chain_rows[1]]))
    torch.testing.assert_close(hidden, unroll(drafter, layout)[1], rtol=1e-5, atol=1e-6)
