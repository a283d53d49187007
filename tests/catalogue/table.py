"""Print the catalogue as a table: each input, what goes wrong with it, and what became of it here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts"), str(Path(__file__).parents[1])]

from catalogue.cases import Case, cases  # noqa: E402 - found through the line above
from catalogue.masks import MaskCase, mask_cases  # noqa: E402


def main() -> None:
    """The command; its exit status is 1 where an outcome is not the expected one."""
    rows = [*map(_row, cases()), *map(_mask_row, mask_cases())]
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    for right, *cells in ((row[3], *row[:3]) for row in rows):
        print(*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), right, sep="  ")
    failed = [row for row in rows if row[3] != "ok"]
    print(f"{len(rows)} inputs, {len(rows) - len(failed)} as expected")
    sys.exit(1 if failed else 0)


def _row(case: Case) -> tuple[str, str, str, str]:
    outcome = case.outcome()
    if "refused" in outcome:
        what = "refused"
    else:
        skipped = [f"{count} {reason}" for reason, count in sorted(outcome["skipped"].items())]
        what = ", ".join([f"{len(outcome['kept'])} kept", *skipped])
    return case.name, case.about, what, "ok" if not case.problems(outcome) else "WRONG"


def _mask_row(case: MaskCase) -> tuple[str, str, str, str]:
    outcome = case.outcome()
    what = outcome["reason"] if "reason" in outcome else f"{len(outcome['rows'])} rows, ids and mask"
    return case.name, case.about, what, "ok" if not case.problems(outcome) else "WRONG"


if __name__ == "__main__":
    main()
