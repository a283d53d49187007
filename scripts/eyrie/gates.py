"""Gates: the conditions that fail a build, each in words: what was seen, expected, and what to change."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from eyrie.config import CountRange, DatasetSettings, GateSettings, config_line
from eyrie.errors import BuildError
from eyrie.records import Ledger

REPEATED = frozenset({"duplicate_prompt", "near_duplicate"})
# Rows left out by the build's own wish say nothing about whether a file was read right.
WANTED_SKIPS = REPEATED | {"over_cap", "over_group_cap", "contaminated"}

# What to change where too many rows stop on their way to samples, by the reason most of them have.
_REMEDIES = {
    "prompt_too_long": "partitions.*.max_new_tokens (prompt and answer must fit the target's context)",
    "truncated": "partitions.*.max_new_tokens or partitions.*.keep_truncated",
    "degenerate": "partitions.*.temperature, or partitions.*.drop_degenerate",
    "too_long": "hidden_states.max_tokens (at most the target's context)",
    "no_supervised_text": "datasets.{dataset}.loss_on, or kind: prompts",
    "template_error": "the dataset's layout, or the target; the job's log shows the first error",
    "foreign_token_id": "the dataset: its rows were tokenized for another model than the target",
    "content_lost": "the target: its template leaves out or changes what is said; the log shows where",
    "tool_calls_lost": "the target: its template has no tool calls; or leave out the rows that have some",
    "reasoning_lost": "the target: its template has no reasoning; or kind: prompts, to have it answer anew",
    "reasoning_unclear": "the dataset's layout: answers have half of a pair of <think> and </think>",
    "no_end_of_turn": "the target: its template doesn't end a turn that calls tools",
}


class GateError(BuildError):
    """A stage's result is not fit to build on."""


def check_rows(
    dataset: str, source: str, ledger: Ledger, settings: DatasetSettings, expected: str
) -> list[str]:
    """Judge what became of a dataset's raw rows.

    source: the raw files' names, and what their rows look like. expected: what the layout looks for in a row.
    Returns what was wrong where the dataset only warns; raises GateError otherwise.
    """
    problems = list(_problems_of_rows(dataset, source, ledger, settings, expected))
    return settle(problems, ledger.kept, settings.gates)


def check_answers(dataset: str, answered: int, truncated: int, failed: int, gates: GateSettings) -> list[str]:
    """Judge a dataset's answers by how many were cut or failed; returns or raises as check_rows does."""
    total = answered + failed
    problems = [
        _too_many(dataset, count, total, f"prompts {name}", limit, change)
        for name, count, limit, change in (
            ("cut at max_new_tokens", truncated, gates.max_truncated_share, "partitions.*.max_new_tokens"),
            ("without an answer", failed, gates.max_failed_share, "the engine; see the job's log"),
        )
        if _above(count, total, limit)
    ]
    return settle(problems, answered, gates)


def check_samples(dataset: str, ledger: Ledger, gates: GateSettings) -> list[str]:
    """Judge how many prompts or conversations became samples; returns or raises as check_rows does.

    Answers left out because they were cut, or are loops, are the build's own wish and don't count against
    the share.
    """
    return settle(list(_problems_of_samples(dataset, ledger, gates)), ledger.kept, gates)


def check_selection(kind: str, kept: Mapping[str, int], expected: CountRange) -> None:
    """Stop the build where the datasets of a kind have another number of rows than it expects.

    kept: rows by dataset. Raises GateError.
    """
    total = sum(kept.values())
    if total in expected:
        return
    raise GateError(
        f"selected rows of kind {kind}\n"
        f"  seen: {total:,}: {', '.join(f'{name} {count:,}' for name, count in sorted(kept.items()))}\n"
        f"  expected: {expected}\n"
        f"  change: the datasets that fell short of their `samples` (each ledger.json says why rows were "
        f"skipped), or {config_line(['expected_samples', kind])}"
    )


def settle(problems: list[str], kept: int, gates: GateSettings) -> list[str]:
    """Raise GateError for the problems, or log and return them where the dataset only warns.

    Nothing kept is never just a warning: no later stage has anything to do with it.
    """
    if problems and (gates.on_fail == "stop" or not kept):
        raise GateError("\n".join(problems))
    for problem in problems:
        logging.getLogger(__name__).warning("gates.on_fail is warn, so the build goes on\n%s", problem)
    return problems


def _problems_of_rows(
    dataset: str, source: str, ledger: Ledger, settings: DatasetSettings, expected: str
) -> Iterator[str]:
    gates = settings.gates
    unwanted = {reason: n for reason, n in ledger.skipped.items() if reason not in WANTED_SKIPS}
    judged = ledger.kept + sum(unwanted.values())
    share = ledger.kept / judged if judged else 0.0
    if ledger.kept < gates.min_kept or (judged and share < gates.min_kept_share):
        yield (
            f"dataset {dataset}: {source}\n"
            f"  seen: kept {ledger.kept} of {ledger.rows} rows ({share:.0%} of those judged); "
            f"skipped: {_listed(unwanted) or 'no row at all'}\n"
            f"  expected: at least {gates.min_kept} rows and a share of {gates.min_kept_share:.0%}; "
            f"{expected}\n"
            f"  change: {config_line(['datasets', dataset, 'layout'])} if the file has another layout, or "
            f"the file, or datasets.{dataset}.gates if so few rows are right"
        )
    range_ = settings.source.expected_rows
    if range_ is not None and ledger.rows not in range_:
        yield (
            f"dataset {dataset}: {source}\n"
            f"  seen: {ledger.rows:,} rows\n"
            f"  expected: {range_}; another release, a cut download or one file too many differs so\n"
            f"  change: {config_line(['datasets', dataset, 'source'])}: files or revision, or "
            "expected_rows if this is the number"
        )
    repeated = sum(ledger.skipped[reason] for reason in REPEATED)
    readable = ledger.rows - sum(unwanted.values())
    if _above(repeated, readable, gates.max_duplicate_share):
        remedy = (
            f"datasets.{dataset}.layout or prompt, if the first user turn is one fixed text, or "
            "gates.max_duplicate_share"
        )
        yield _too_many(
            dataset, repeated, readable, "rows repeat a prompt", gates.max_duplicate_share, remedy
        )
    empty, limit = ledger.skipped["no_supervised_text"], gates.max_empty_answer_share
    if settings.kind == "native" and _above(empty, ledger.rows, limit):
        remedy = "the dataset's layout, if the answers stand elsewhere, or kind: prompts"
        yield _too_many(dataset, empty, ledger.rows, "rows without an answer", limit, remedy)


def _problems_of_samples(dataset: str, ledger: Ledger, gates: GateSettings) -> Iterator[str]:
    judged = ledger.rows - ledger.skipped["truncated"] - ledger.skipped["degenerate"]
    share = ledger.kept / judged if judged else 0.0
    if ledger.kept < gates.min_kept or share < gates.min_kept_share:
        reason = max(sorted(ledger.skipped), key=lambda name: ledger.skipped[name], default="")
        remedy = _REMEDIES.get(reason, "the dataset's prompts").format(dataset=dataset)
        yield (
            f"dataset {dataset}\n"
            f"  seen: {ledger.kept} of {ledger.rows} rows became samples; "
            f"skipped: {_listed(ledger.skipped) or 'no row at all'}\n"
            f"  expected: at least {gates.min_kept} samples and {gates.min_kept_share:.0%} of the rows\n"
            f"  change: {remedy}; or {config_line(['datasets', dataset, 'gates'])} if so few are right"
        )
    blank, limit = ledger.skipped["no_supervised_text"], gates.max_unsupervised_share
    if _above(blank, ledger.rows, limit):
        remedy = _REMEDIES["no_supervised_text"].format(dataset=dataset)
        yield _too_many(dataset, blank, ledger.rows, "loss masks are all zero", limit, remedy)


def _above(count: int, total: int, limit: float) -> bool:
    return total > 0 and count / total > limit


def _too_many(dataset: str, count: int, total: int, what: str, limit: float, change: str) -> str:
    return (
        f"dataset {dataset}\n"
        f"  seen: {count} of {total} {what} ({count / total:.1%})\n"
        f"  expected: at most {limit:.1%}\n"
        f"  change: {change}, or {config_line(['datasets', dataset, 'gates'])}"
    )


def _listed(skipped: Mapping[str, int]) -> str:
    """Counts by reason, the largest first."""
    reasons = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in reasons if count)
