from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from eyrie.degenerate import DISTINCT_SHARE, FEWEST_RUNS, RUN, is_degenerate

IDS = st.integers(0, 50_000)


def rounds(period: int) -> int:
    """How often a loop must go round to be one for sure: eight times, and 32 runs at least."""
    return -(-max(period / DISTINCT_SHARE, FEWEST_RUNS) // period) + -(-RUN // period)


@given(before=st.lists(IDS, max_size=200), loop=st.lists(IDS, min_size=1, max_size=60))
def test_a_loop_is_found_whatever_came_before(before: list[int], loop: list[int]) -> None:
    assert is_degenerate(before + loop * int(rounds(len(loop))))


@given(loop=st.lists(IDS, min_size=4, max_size=60, unique=True), end=st.lists(IDS, max_size=3))
def test_a_loop_that_was_left_is_one_where_it_went_round_often(loop: list[int], end: list[int]) -> None:
    assert is_degenerate(loop * 20 + end)
    assert not is_degenerate(loop * 6)


@given(st.lists(IDS, max_size=400, unique=True))
def test_no_repetition_is_no_loop(ids: list[int]) -> None:
    assert not is_degenerate(ids)


@given(st.lists(st.integers(0, 3), max_size=RUN + FEWEST_RUNS - 2))
def test_short_answers_are_never_loops(ids: list[int]) -> None:
    assert not is_degenerate(ids)


@given(st.integers(0, 1000))
def test_a_list_with_a_fixed_form_is_none(seed: int) -> None:
    """Half of the tokens are the list's form, as in a table of numbers."""
    draw = random.Random(seed)
    ids = [token for _ in range(100) for token in (5, draw.randrange(1000), 6, draw.randrange(1000))]
    assert not is_degenerate(ids)


@given(st.lists(IDS, max_size=100), st.lists(IDS, min_size=1, max_size=100))
def test_only_the_end_counts(before: list[int], ids: list[int]) -> None:
    if is_degenerate(ids):
        assert is_degenerate(before + ids)


def test_it_takes_linear_time() -> None:
    draw = random.Random(0)
    ids = [draw.randrange(50_000) for _ in range(400_000)]

    def seconds(count: int) -> float:
        start = time.process_time()
        is_degenerate(ids[:count])
        return time.process_time() - start

    small = min(seconds(40_000) for _ in range(3))
    assert min(seconds(400_000) for _ in range(2)) < 25 * small
