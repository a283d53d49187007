"""A share of the training groups, for drafters that are to tell what more data would bring."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from eyrie.eagle3.samples import Row
from eyrie.gates import GateError
from eyrie.split import position_of


def rows_of_share(rows: Sequence[Row], share: Fraction) -> list[Row]:
    """The rows without those of the training groups beyond a share, which a hash of the group decides.

    So a larger share holds every group of a smaller one. Raises GateError where no training row is left.
    """
    kept = [
        row
        for row in rows
        if row.split != "train" or position_of("scaling", 0, row.dataset, row.group) < share
    ]
    if not any(row.split == "train" for row in kept):
        raise GateError(
            f"no row to train on in a share of {share} of the training groups\n"
            "  change: larger scaling.shares, or more samples"
        )
    return kept
