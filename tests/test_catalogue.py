"""Malformed and tricky inputs, each a folder of the catalogue: kept, skipped or refused as expected."""

from __future__ import annotations

import pytest

from catalogue.cases import Case, cases

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_input_has_its_outcome(case: Case) -> None:
    assert case.problems(case.outcome()) == []


def test_the_catalogue_is_large_and_each_case_says_what_it_is_about() -> None:
    assert len(CASES) >= 80
    assert all(case.about.strip() and case.files for case in CASES)
    assert len({case.about for case in CASES}) == len(CASES)
