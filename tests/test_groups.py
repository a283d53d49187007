from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from eyrie.groups import groups


@given(st.lists(st.integers(1, 50)), st.integers(1, 6), st.integers(1, 100))
def test_groups_are_all_items_in_order_within_both_bounds(sizes: list[int], most: int, limit: int) -> None:
    found = [list(group) for group in groups(sizes, sizes, most, limit)]
    assert [size for group in found for size in group] == sizes
    for group in found:
        assert 1 <= len(group) <= most
        assert len(group) == 1 or sum(group) <= limit
    # None is smaller than it need be.
    for group, following in itertools.pairwise(found):
        assert len(group) == most or sum(group) + following[0] > limit
