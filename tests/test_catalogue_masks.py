from __future__ import annotations

import pytest

from catalogue.masks import MaskCase, mask_cases

CASES = mask_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_mask_case(case: MaskCase) -> None:
    assert case.problems(case.outcome()) == []


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 20
    assert sum("reason" in case.expected for case in CASES) >= 5
