"""Drafted decoding writes what the target writes alone, and counts what it accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.acceptance import (
    Cycle,
    acceptance_by_position,
    acceptance_length,
    distinct_bigrams,
    first_difference,
    predicted_speed_up,
)
from eyrie.decoding import DraftPass, greedy, speculative
from eyrie.eagle3.model import DraftCache, Drafter
from eyrie.target import Target
from tiny_drafting import LAYER_IDS, VOCABULARY, random_drafter, save_tiny_target

PROMPTS = st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=12)
NEVER = VOCABULARY  # no token has this id, so no answer ends by itself


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(save_tiny_target(tmp_path_factory.mktemp("target")), "float32", LAYER_IDS)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_tiny_target(tmp_path_factory.mktemp("windowed"), window=6)
    return Target(folder, "float32", LAYER_IDS)


def end_at(target: Target, token: int) -> None:
    target.model.generation_config.eos_token_id = token


@torch.inference_mode()
def naive_greedy(target: Target, prompt: Sequence[int], tokens: int) -> list[int]:
    """Every token from a pass over everything before it, without a cache."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(target.logits(target.forward(torch.tensor([ids])).last[0, -1]).argmax()))
    return ids[len(prompt) :]


@torch.inference_mode()
def naive_draft(target: Target, drafter: Drafter, ids: Sequence[int], count: int) -> list[int]:
    """Drafts after ids from passes over everything before them, without a cache.

    A chain's own states follow the verified positions, so that one causal pass is the whole computation.
    """
    ids = list(ids)
    hidden = drafter.project(target.forward(torch.tensor([ids[:-1]])).aux)
    for _ in range(count):
        embeddings = drafter.embed(torch.tensor([ids[1:]]))
        states = drafter.step(embeddings, hidden, torch.arange(len(ids) - 1)[None])
        ids.append(int(drafter.to_target_ids(drafter.draft_logits(states[0, -1]).argmax())))
        hidden = torch.cat([hidden, states[:, -1:]], dim=1)
    return ids[-count:]


class Oracle:
    """A drafter whose state is its position, and which knows the right token of every position.

    wrong: the positions at which it proposes something else.
    """

    def __init__(self, right: Sequence[int], wrong: Sequence[int] = ()) -> None:
        self.right = [(t + 1) % VOCABULARY if p in wrong else t for p, t in enumerate(right)]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids[..., None].float()

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        return aux[..., :1]

    def step(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, position_ids: torch.Tensor, cache: DraftCache
    ) -> torch.Tensor:
        kept = position_ids[:, None, :, None].float()
        assert cache.length == position_ids[0, 0], "keys of verified positions and this chain, no others"
        cache.append(kept, kept)
        return position_ids[..., None].float()

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = hidden[..., 0].long() + 2
        tokens = torch.tensor(self.right)[positions.clamp(max=len(self.right) - 1)]
        return torch.nn.functional.one_hot(tokens, VOCABULARY).float()

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids


@settings(max_examples=10, derandomize=True)
@given(prompt=PROMPTS)
def test_greedy_equals_decoding_without_a_cache(target: Target, prompt: list[int]) -> None:
    end_at(target, NEVER)
    expected = naive_greedy(target, prompt, 8)
    assert greedy(target, prompt, 8).token_ids == expected
    end_at(target, expected[3])
    assert greedy(target, prompt, 8).token_ids == expected[: expected.index(expected[3]) + 1]


def test_margins_are_those_of_the_two_best_logits(target: Target) -> None:
    end_at(target, NEVER)
    prompt = [3, 4, 5]
    output = greedy(target, prompt, 5, with_margins=True)
    for i, margin in enumerate(output.margins):
        states = target.forward(torch.tensor([prompt + output.token_ids[:i]]))
        best = target.logits(states.last[0, -1]).sort(descending=True).values
        assert margin == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert len(output.margins) == 5
    assert greedy(target, prompt, 5).margins == []


@settings(max_examples=30, derandomize=True)
@given(
    prompt=PROMPTS,
    length=st.integers(1, 7),
    limit=st.integers(1, 20),
    seed=st.integers(0, 9),
    end=st.none() | st.integers(0, 19),
)
def test_drafted_output_equals_plain_output(
    target: Target, prompt: list[int], length: int, limit: int, seed: int, end: int | None
) -> None:
    end_at(target, NEVER)
    if end is not None:
        end_at(target, naive_greedy(target, prompt, end + 1)[end])
    plain = greedy(target, prompt, limit).token_ids
    drafted = speculative(target, random_drafter(target, seed), prompt, limit, length)
    assert drafted.token_ids == plain
    assert len(drafted.from_drafter) == len(plain)
    assert sum(drafted.from_drafter) == sum(cycle.accepted for cycle in drafted.cycles)
    written = 1
    for cycle in drafted.cycles:
        assert cycle.offered == min(length, limit - written - 1)
        assert cycle.accepted <= cycle.offered
        written += cycle.accepted + 1


@settings(max_examples=10, derandomize=True)
@given(prompt=PROMPTS, length=st.integers(1, 5), seed=st.integers(0, 3), wrong=st.sets(st.integers(0, 40)))
def test_targets_with_attention_windows(
    windowed: Target, prompt: list[int], length: int, seed: int, wrong: set[int]
) -> None:
    """Cached keys beyond the window are gone; rejected ones must not have pushed them out."""
    end_at(windowed, NEVER)
    plain = greedy(windowed, prompt, 16).token_ids
    assert plain == naive_greedy(windowed, prompt, 16)
    for drafter in (random_drafter(windowed, seed), Oracle(prompt + plain, tuple(wrong))):
        assert speculative(windowed, drafter, prompt, 16, length).token_ids == plain


@pytest.mark.parametrize("length", [1, 3, 5])
def test_cycles_equal_a_walk_without_caches(target: Target, length: int) -> None:
    end_at(target, NEVER)
    accepted = 0
    for seed in range(5):
        prompt = [2 + seed, 7, 9]
        ids = [*prompt, *greedy(target, prompt, 20).token_ids]
        frequent = [token for token, _ in Counter(ids).most_common(3)]
        drafter = random_drafter(target, seed, frequent)
        drafted = speculative(target, drafter, prompt, 20, length)
        written = len(prompt) + 1
        for cycle in drafted.cycles:
            drafts = naive_draft(target, drafter, ids[:written], cycle.offered) if cycle.offered else []
            expected = first_difference(drafts, ids[written : written + len(drafts)])
            assert cycle.accepted == (len(drafts) if expected is None else expected)
            written += cycle.accepted + 1
            accepted += cycle.accepted
        assert written == len(prompt) + 20
    assert accepted > 10, "drafters that are never right would test nothing"


def test_drafts_after_several_intakes_equal_drafts_from_scratch(target: Target) -> None:
    """The cache of verified positions, filled in pieces and used between, equals one pass over all."""
    ids = [3, 9, 4, 11, 8, 2, 17, 6, 5]
    for seed in range(8):
        drafter = random_drafter(target, seed)
        chain = DraftPass(drafter, torch.device("cpu"))
        aux = target.forward(torch.tensor([ids[:-1]])).aux
        for start, end in ((0, 4), (4, 5), (5, 8)):
            drafts = chain.draft(aux[:, start:end], ids[start + 1 : end + 1], 4)
            assert drafts == naive_draft(target, drafter, ids[: end + 1], 4)


def test_a_perfect_drafter_has_everything_accepted(target: Target) -> None:
    end_at(target, NEVER)
    prompt = [5, 6, 7, 8]
    plain = greedy(target, prompt, 30).token_ids
    drafted = speculative(target, Oracle(prompt + plain), prompt, 14, 3)
    # 1 token from the prompt's pass, three cycles of 4, and one place left: no draft fits.
    assert drafted.cycles == [Cycle(3, 3)] * 3 + [Cycle(0, 0)]
    assert drafted.token_ids == plain[:14]
    assert drafted.from_drafter == [False] + [True, True, True, False] * 3 + [False]
    assert speculative(target, Oracle(prompt + plain), prompt, 7, 9).cycles == [Cycle(5, 5)]


def test_a_drafter_that_errs_at_known_positions(target: Target) -> None:
    end_at(target, NEVER)
    prompt = [5, 6, 7, 8]
    plain = greedy(target, prompt, 30).token_ids
    oracle = Oracle(prompt + plain, wrong=[len(prompt) + 2, len(prompt) + 3])
    drafted = speculative(target, oracle, prompt, 12, 3)
    assert drafted.token_ids == plain[:12]
    assert drafted.cycles == [Cycle(3, 1), Cycle(3, 0), Cycle(3, 3), Cycle(3, 3)]
    # Of a draft of three the first place was right, then of another none: where the target overruled them.
    assert {place: len(drafts) for place, drafts in drafted.refused.items()} == {2: 2, 3: 3}
    assert all(drafts[0] != plain[place] for place, drafts in drafted.refused.items())


def test_an_accepted_end_of_sequence_ends_the_answer(target: Target) -> None:
    end_at(target, NEVER)
    prompt = next(
        [5, 6, first]
        for first in range(2, VOCABULARY)
        if (plain := greedy(target, [5, 6, first], 8).token_ids).count(plain[3]) == 1
        or plain.index(plain[3]) == 3
    )
    plain = greedy(target, prompt, 8).token_ids
    end_at(target, plain[3])
    drafted = speculative(target, Oracle(prompt + plain), prompt, 20, 5)
    assert drafted.token_ids == plain[:4]
    assert drafted.cycles == [Cycle(5, 3)], "tokens drafted after the end count for nothing"
    assert drafted.from_drafter == [False, True, True, True]
    assert drafted.refused == {}, "nor were they refused"


CYCLES = st.lists(
    st.integers(0, 4).flatmap(lambda n: st.builds(Cycle, st.just(n), st.integers(0, n))), max_size=30
)


@given(cycles=CYCLES)
def test_position_rates_sum_to_the_acceptance_length(cycles: list[Cycle]) -> None:
    length = acceptance_length(cycles, 4)
    rates = acceptance_by_position(cycles, 4)
    if length is None:
        assert rates == []
        assert all(cycle.offered < 4 for cycle in cycles)
    else:
        assert 1 + sum(rates) == pytest.approx(length)
        assert rates == sorted(rates, reverse=True)


def test_cycles_cut_short_are_left_out() -> None:
    cycles = [Cycle(3, 3), Cycle(3, 0), Cycle(1, 1)]
    assert acceptance_length(cycles, 3) == 2.5
    assert acceptance_by_position(cycles, 3) == [0.5, 0.5, 0.5]


def test_small_figures() -> None:
    assert predicted_speed_up(2.018, 3, 0.060, 1.11) == pytest.approx(1.564, abs=1e-3)
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert distinct_bigrams([4, 4, 4, 4, 4]) == 0.25
    assert distinct_bigrams([1, 2, 3]) == 1.0
