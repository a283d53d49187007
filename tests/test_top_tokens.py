"""The loss with the target's likeliest tokens alone, against the formula written out and autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import ConfigError, TrainingSettings
from eyrie.eagle3.batches import Sample, make_batch
from eyrie.eagle3.least_squares import initialise_by_least_squares
from eyrie.eagle3.loss import SoftCrossEntropy, _TopGoal, unrolled_loss
from eyrie.store import TopTokens
from tiny_eagle3 import HIDDEN, VOCABULARY, random_drafter, random_sample

PLACES, WIDTH = 7, 5


def cut(logits: torch.Tensor, k: int) -> TopTokens:
    """The k likeliest tokens of logits [T, D]; in float32, so that only the cutting is tested."""
    logs = logits.float().log_softmax(dim=-1)
    order = logs.argsort(dim=-1, descending=True, stable=True)
    ids = order[:, :k]
    rest = logs.exp().gather(1, order[:, k:]).sum(-1)
    return TopTokens(ids.int(), logs.gather(1, ids), rest, order[:, 0].int())


def formula(logits: torch.Tensor, top: TopTokens) -> torch.Tensor:
    """-sum p log q - rest * log(1 - sum q) of each row, in float64."""
    drafted = logits.double().log_softmax(dim=-1)
    chances = top.logs.double().exp()
    ids = top.ids.long()
    loss = -(chances * drafted.gather(1, ids)).sum(-1)
    if ids.shape[1] < logits.shape[1]:
        outside = torch.ones_like(drafted, dtype=torch.bool).scatter(1, ids, False)
        left = drafted.masked_fill(~outside, -torch.inf).logsumexp(-1)
        loss = loss - top.rest.double() * left
    return loss


@settings(max_examples=40)
@given(
    size=st.integers(2, 30),
    k=st.integers(1, 30),
    sharpness=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_are_those_of_the_formula(size: int, k: int, sharpness: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    top = cut(torch.randn(PLACES, size, generator=generator) * 3, min(k, size))
    weight = torch.randn(size, WIDTH, generator=generator) * sharpness
    states = [torch.randn(PLACES, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)]
    places, scales = [torch.arange(PLACES), torch.tensor([1, 2, 5, 6])], [0.5, 0.25]

    inputs = [tensor.clone().requires_grad_() for tensor in (weight, *states)]
    goal = _TopGoal(top, size)
    found = SoftCrossEntropy.apply(inputs[0], goal, places, scales, torch.float32, None, *inputs[1:])
    found.backward()

    exact = [tensor.double().requires_grad_() for tensor in (weight, *states)]
    expected = sum(
        scale * formula(state @ exact[0].t(), TopTokens(*(part[place] for part in vars(top).values()))).sum()
        for state, place, scale in zip(exact[1:], places, scales, strict=True)
    )
    expected.backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    for own, other in zip(inputs, exact, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-4, atol=1e-4 * max(1.0, sharpness))


@pytest.fixture(scope="module")
def head() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))


def with_top(sample: Sample, head_rows: torch.Tensor, k: int) -> Sample:
    assert sample.last is not None
    return replace(sample, last=None, top=cut(sample.last.float() @ head_rows.t(), k))


@pytest.mark.parametrize(("k", "near"), [(40, 1e-5), (38, 1e-2)])
def test_all_tokens_kept_give_the_whole_distributions_loss(head: torch.Tensor, k: int, near: float) -> None:
    drafter = random_drafter()
    made, head_rows = TrainingSettings(), head[drafter.t2d]
    samples = [random_sample(seed, mask, head) for seed, mask in enumerate([[0] * 4 + [1] * 8, [1] * 9])]
    places = [sample.supervised(drafter.t2d) for sample in samples]
    results = []
    for given_samples in (samples, [with_top(sample, head_rows, k) for sample in samples]):
        batch = make_batch(given_samples, places, 3)
        assert (batch.last is None) == (batch.top is not None)
        drafter.zero_grad()
        loss = unrolled_loss(drafter, batch, head_rows, made, torch.float32)
        loss.backward()
        results.append((loss.detach(), drafter.fc.weight.grad.clone(), drafter.lm_head.weight.grad.clone()))
    for whole, top in zip(*results, strict=True):
        torch.testing.assert_close(top, whole, rtol=near, atol=near)
    # Grouping the other tokens' mass can only make the loss smaller.
    assert results[1][0] <= results[0][0] + 1e-5


def test_float16_logs_and_bfloat16_products_train(head: torch.Tensor) -> None:
    drafter = random_drafter()
    sample = random_sample(0, [0] * 4 + [1] * 8, head)
    top = with_top(sample, head[drafter.t2d], 8)
    assert top.top is not None
    top = replace(top, top=replace(top.top, logs=top.top.logs.half()))
    batch = make_batch([top], [sample.candidates], 3)
    losses = [
        unrolled_loss(drafter, batch, head[drafter.t2d], TrainingSettings(), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    losses[1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=3e-2, atol=0.0)
    assert all(parameter.grad.isfinite().all() for parameter in drafter.parameters())


def test_least_squares_needs_the_last_states(head: torch.Tensor) -> None:
    drafter = random_drafter()
    sample = with_top(random_sample(0, [1] * 9, head), head[drafter.t2d], 4)
    with pytest.raises(ConfigError, match="top_tokens: null"):
        initialise_by_least_squares(drafter, [sample], head[drafter.t2d], 0)
