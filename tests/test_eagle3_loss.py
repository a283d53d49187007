"""The gathered loss against the published algorithm written out in full, and where gradients fall."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import TrainingSettings
from eyrie.eagle3 import loss
from eyrie.eagle3.batches import Batch, Sample, candidate_places, make_batch, target_choices
from eyrie.eagle3.loss import step_divisors, unrolled_loss
from eyrie.eagle3.model import DraftCache, Drafter
from eyrie.eagle3.unroll import Unroll, unroll
from plain_eagle3 import plain_loss, plain_steps
from tiny_eagle3 import HIDDEN, VOCABULARY, random_drafter, random_sample

STEPS = 4
DEFAULT = TrainingSettings(step_decay=0.7)


@pytest.fixture(scope="module")
def head() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))


def dense_loss(
    drafter: Drafter, samples: Sequence[Sample], head: torch.Tensor, made: TrainingSettings
) -> torch.Tensor:
    every = [
        plain_steps(drafter, sample, head, STEPS, made.mask_shift, made.position_mask) for sample in samples
    ]
    return plain_loss(every, made.step_decay, made.loss_normalisation)


def whole_batch(drafter: Drafter, samples: Sequence[Sample], made: TrainingSettings = DEFAULT) -> Batch:
    places = [sample.supervised(drafter.t2d, made.position_mask) for sample in samples]
    return make_batch(samples, places, STEPS)


def gathered_loss(
    drafter: Drafter,
    samples: Sequence[Sample],
    head: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    made: TrainingSettings = DEFAULT,
) -> torch.Tensor:
    return unrolled_loss(drafter, whole_batch(drafter, samples, made), head[drafter.t2d], made, dtype)


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


CONVENTIONS = [
    DEFAULT.model_copy(update=changes)
    for changes in (
        {},
        {"mask_shift": "legacy"},
        {"loss_normalisation": "positions"},
        {"position_mask": False, "mask_shift": "shifted"},
        {"mask_shift": "legacy", "loss_normalisation": "positions", "step_decay": 1.0},
    )
]


@pytest.mark.parametrize("made", CONVENTIONS)
def test_loss_and_all_gradients_are_those_of_the_dense_algorithm(
    head: torch.Tensor, made: TrainingSettings
) -> None:
    drafter = random_drafter(draft_vocabulary=60)
    # The last mask supervises nothing under legacy; a sample without a place is not trained on.
    masks = MASKS if made.mask_shift == "aligned" else MASKS[:3]
    samples = [random_sample(seed, mask, head, made.mask_shift) for seed, mask in enumerate(masks)]
    dense = dense_loss(drafter, samples, head, made)
    expected = gradients(drafter, dense)
    gathered = gathered_loss(drafter, samples, head, made=made)
    found = gradients(drafter, gathered)
    torch.testing.assert_close(gathered, dense, rtol=1e-5, atol=1e-5)
    assert expected.keys() == found.keys() and len(found) == 13
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@settings(max_examples=25)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=14), min_size=1, max_size=3),
    made=st.sampled_from(CONVENTIONS),
    seed=st.integers(0, 50),
)
def test_any_mask_gives_the_dense_loss(masks: list[list[int]], made: TrainingSettings, seed: int) -> None:
    head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))
    drafter = random_drafter(seed)
    samples = [
        random_sample(seed + 1 + index, mask, head, made.mask_shift) for index, mask in enumerate(masks)
    ]
    samples = [sample for sample in samples if len(sample.supervised(drafter.t2d, made.position_mask))]
    if not samples:
        return
    torch.testing.assert_close(
        gathered_loss(drafter, samples, head, made=made),
        dense_loss(drafter, samples, head, made),
        rtol=1e-4,
        atol=1e-5,
    )


@settings(max_examples=10)
@given(made=st.sampled_from(CONVENTIONS), cut=st.integers(1, len(MASKS) - 1), seed=st.integers(0, 50))
def test_parts_of_a_batch_add_up_to_the_whole(made: TrainingSettings, cut: int, seed: int) -> None:
    head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))
    drafter = random_drafter(seed, draft_vocabulary=VOCABULARY)
    samples = [random_sample(seed + i, mask, head, made.mask_shift) for i, mask in enumerate(MASKS[:3])]
    head_rows = head[drafter.t2d]
    whole = whole_batch(drafter, samples, made)
    expected = gradients(drafter, unrolled_loss(drafter, whole, head_rows, made, torch.float32))
    parts = [whole_batch(drafter, part, made) for part in (samples[:cut], samples[cut:]) if part]
    divisors = [step_divisors(part, made) for part in parts]
    totals = [sum(steps) for steps in zip(*divisors, strict=True)]
    assert totals == step_divisors(whole, made)
    drafter.zero_grad()
    for part in parts:
        unrolled_loss(drafter, part, head_rows, made, torch.float32, totals).backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_pieces_of_a_batch_give_one_loss(head: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = random_drafter()
    samples = [random_sample(seed, mask, head) for seed, mask in enumerate(MASKS[:3])]
    at_once = gathered_loss(drafter, samples, head)
    expected = gradients(drafter, at_once)
    monkeypatch.setattr(loss, "PIECE", 3)
    in_pieces = gathered_loss(drafter, samples, head)
    torch.testing.assert_close(in_pieces, at_once, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(drafter, in_pieces).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_frozen_head_gets_no_gradient_and_the_rest_the_same(head: torch.Tensor) -> None:
    drafter = random_drafter()
    samples = [random_sample(0, MASKS[0], head)]
    expected = gradients(drafter, gathered_loss(drafter, samples, head))
    drafter.zero_grad()
    drafter.lm_head.weight.requires_grad_(False)
    gathered_loss(drafter, samples, head).backward()
    assert drafter.lm_head.weight.grad is None
    torch.testing.assert_close(drafter.fc.weight.grad, expected["fc.weight"])


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
        assert sample.last is not None
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
    assert candidate_places(mask, "shifted").tolist() == [3, 4, 5]
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


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_gives_the_same_states(head: torch.Tensor) -> None:
    """Uncompiled, as it runs on a CPU, forward only; tests/gpu/check.sh compares gradients on a GPU."""
    drafter = random_drafter()
    samples = [random_sample(seed, mask, head) for seed, mask in enumerate(MASKS[:3])]
    layout = make_batch(samples, [sample.candidates for sample in samples], 3).layout
    with torch.no_grad():
        for own, flex in zip(unroll(drafter, layout), unroll(drafter, layout, flex=True), strict=True):
            torch.testing.assert_close(flex, own, rtol=1e-4, atol=1e-5)


def test_unrolling_step_by_step_with_the_same_tokens_is_unroll(head: torch.Tensor) -> None:
    drafter = random_drafter()
    sample = random_sample(4, MASKS[0], head)
    layout = make_batch([sample], [sample.candidates], 2).layout
    run = Unroll(drafter, layout)
    hidden = run.first(run.embed(layout.chain_tokens[layout.chain_rows[0]]))
    hidden = run.next(hidden, run.embed(layout.chain_tokens[layout.chain_rows[1]]))
    torch.testing.assert_close(hidden, unroll(drafter, layout)[1], rtol=1e-5, atol=1e-6)


def test_more_steps_can_be_taken_than_the_layout_is_for(head: torch.Tensor) -> None:
    drafter = random_drafter()
    sample = random_sample(4, MASKS[0], head)
    short, long = (make_batch([sample], [sample.candidates[-1:]], steps).layout for steps in (1, 4))
    run, tokens = Unroll(drafter, short), torch.tensor([3])
    ran = Unroll(drafter, long)
    rows = torch.tensor([len(long.query_positions) - 1])
    same = long.query_rows[rows] == short.query_rows
    assert same.all()
    hidden, other = run.first(run.embed(tokens)), ran.first(ran.embed(tokens.expand(len(long.query_rows))))
    for _ in range(3):
        hidden = run.next(hidden, run.embed(tokens))
        other = ran.next(other, ran.embed(tokens.expand(len(other))))
    torch.testing.assert_close(hidden, other[rows], rtol=1e-5, atol=1e-6)
