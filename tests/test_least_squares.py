"""The first weights that least squares fit: exact where the states are linear, better than none elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyrie.eagle3 import least_squares
from eyrie.eagle3.batches import Sample, lay_out
from eyrie.eagle3.least_squares import _Positions, _reduced_rank, initialise_by_least_squares
from eyrie.eagle3.model import Drafter, rms_normalise
from eyrie.eagle3.unroll import unroll
from tiny_eagle3 import HIDDEN, VOCABULARY, random_drafter, random_sample

ROWS = 40
LENGTH = 30


def linear_samples(drafter: Drafter) -> list[Sample]:
    """Samples whose state is a mixture of the state before and the token that came in between."""
    generator = torch.Generator().manual_seed(5)
    turn = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
    spread = torch.randn(HIDDEN, 3 * HIDDEN, generator=generator)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    samples = []
    for number in range(ROWS):
        sample = random_sample(number, [0] * 5 + [1] * (LENGTH - 5), head)
        states = [torch.randn(HIDDEN, generator=generator)]
        for token in sample.token_ids[1:]:
            embedded = rms_normalise(drafter.embed(token), 1e-5)
            states.append(rms_normalise(states[-1] @ turn + embedded, 1e-5))
        state = torch.stack(states)
        samples.append(replace(sample, aux=state @ spread, last=state * drafter.norm.weight.detach()))
    return samples


def error_of_next_state(drafter: Drafter, samples: list[Sample]) -> float:
    """1 - mean cosine of the drafter's first-step states and the target's states that they stand for."""
    queries = [torch.arange(len(sample.token_ids) - 1) for sample in samples]
    with torch.no_grad():
        hidden = unroll(drafter, lay_out(samples, queries, 1))[0]
    wanted = torch.cat([sample.last[1:] / drafter.norm.weight for sample in samples])
    return 1 - torch.nn.functional.cosine_similarity(hidden, wanted, dim=-1).mean().item()


@pytest.fixture
def drafter() -> Drafter:
    # As many key heads as heads: the values then have the full rank.
    return random_drafter(num_attention_heads=4, num_key_value_heads=4)


def test_a_state_that_follows_linearly_is_predicted(drafter: Drafter) -> None:
    samples = linear_samples(drafter)
    head = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    before = error_of_next_state(drafter, samples)
    initialise_by_least_squares(drafter, samples[:30], head, seed=0)
    # On rows that were not fitted. The rest is the attention that a position does not give to itself.
    assert error_of_next_state(drafter, samples[30:]) < 0.25 < 0.5 * before


def test_features_are_the_targets_last_state(drafter: Drafter) -> None:
    samples = linear_samples(drafter)
    initialise_by_least_squares(drafter, samples, torch.eye(HIDDEN), seed=0)
    aux = torch.cat([sample.aux for sample in samples])
    state = torch.cat([sample.last for sample in samples]) / drafter.norm.weight
    features = drafter.project(aux)
    assert torch.nn.functional.cosine_similarity(features, state, dim=-1).min() > 0.999
    assert drafter.fc.weight.square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-3)


def test_reduced_rank_finds_a_map_of_that_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 12, generator=generator)
    truth = torch.randn(12, 3, generator=generator) @ torch.randn(3, 8, generator=generator)
    metric = torch.diag(torch.rand(8, generator=generator) + 0.5)
    nothing = torch.zeros(500, 1)
    positions = _Positions(nothing, nothing, nothing, nothing, torch.ones(500, 1))
    inner, outer = _reduced_rank(positions, x, x @ truth, metric, 3)
    assert inner.shape == (3, 12) and outer.shape == (8, 3)
    torch.testing.assert_close(inner.t() @ outer.t(), truth, rtol=0.02, atol=0.02)
    # With fewer directions than it has, something is lost.
    less, to = _reduced_rank(positions, x, x @ truth, metric, 2)
    assert (less.t() @ to.t() - truth).norm() > 0.1 * truth.norm()


def test_very_many_positions_are_thinned_out_the_same_way(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = linear_samples(drafter)
    monkeypatch.setattr(least_squares, "_MOST_POSITIONS", 300)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    first, second = (least_squares._gather(drafter, samples, generator) for generator in generators)
    assert len(first.aux) == 300
    torch.testing.assert_close(first.aux, second.aux, rtol=0, atol=0)


def test_the_supervised_positions_count_more(drafter: Drafter) -> None:
    samples = linear_samples(drafter)[:1]
    positions = least_squares._gather(drafter, samples, torch.Generator())
    # Position p predicts token p + 2; tokens from 5 on are supervised, so positions from 3 on are.
    assert (positions.weight[:, 0].square().round() == 3).tolist() == [False] * 3 + [True] * (LENGTH - 4)


def test_a_scale_of_zero_in_the_norm_makes_no_infinity(drafter: Drafter) -> None:
    with torch.no_grad():
        drafter.norm.weight[0] = 0.0
    initialise_by_least_squares(drafter, linear_samples(random_drafter()), torch.eye(HIDDEN), seed=0)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())
