"""Gates: the conditions that fail a build, each in words: what was seen, expected, and what to change."""

from __future__ import annotations

from eyrie.config import GateSettings, config_line
from eyrie.errors import BuildError
from eyrie.records import Ledger

# Rows left out by the build's own wish say nothing about whether a file was read right.
WANTED_SKIPS = frozenset({"duplicate_prompt", "over_cap"})


class GateError(BuildError):
    """A stage's result is not fit to build on."""


def check_kept_rows(dataset: str, source: str, ledger: Ledger, gates: GateSettings, expected: str) -> None:
    """Stop a dataset of which too few rows could be read.

    source: the raw files' names. expected: what the layout looks for in a row. Raises GateError.
    """
    unwanted = {reason: n for reason, n in ledger.skipped.items() if reason not in WANTED_SKIPS}
    judged = ledger.kept + sum(unwanted.values())
    share = ledger.kept / judged if judged else 0.0
    if ledger.kept >= gates.min_kept and (share >= gates.min_kept_share or not judged):
        return
    seen = ", ".join(f"{n} {reason}" for reason, n in sorted(unwanted.items())) or "no row at all"
    raise GateError(
        f"dataset {dataset}: {source}\n"
        f"  seen: kept {ledger.kept} of {ledger.rows} rows ({share:.0%} of those judged); skipped: {seen}\n"
        f"  expected: at least {gates.min_kept} rows and a share of {gates.min_kept_share:.0%}; {expected}\n"
        f"  change: {config_line(['datasets', dataset, 'layout'])} if the file has another layout, or the "
        f"file, or datasets.{dataset}.gates if so few rows are right"
    )


def check_answers(dataset: str, answered: int, truncated: int, failed: int, gates: GateSettings) -> None:
    """Stop a dataset of whose answers too many were cut or failed. Raises GateError."""
    total = answered + failed
    for name, count, limit, change in (
        ("cut at max_new_tokens", truncated, gates.max_truncated_share, "partitions.*.max_new_tokens"),
        ("without an answer", failed, gates.max_failed_share, "the engine; see the job's log"),
    ):
        if total and count / total > limit:
            raise GateError(
                f"dataset {dataset}\n"
                f"  seen: {count} of {total} prompts {name} ({count / total:.1%})\n"
                f"  expected: at most {limit:.1%}\n"
                f"  change: {change}, or {config_line(['datasets', dataset, 'gates'])}"
            )
