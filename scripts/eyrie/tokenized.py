"""Tokenized samples: what the two stages that write tokenized_data.jsonl share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyrie.chat import Chat
from eyrie.config import ConfigError, GateSettings, SplitSettings, config_line
from eyrie.gates import GateError
from eyrie.records import Ledger, RecordError, read_json, read_jsonl
from eyrie.split import share_of

# What to change where too many rows stop for a reason.
_REMEDIES = {
    "prompt_too_long": "partitions.*.max_new_tokens (prompt and answer must fit the target's context)",
    "truncated": "partitions.*.max_new_tokens or partitions.*.keep_truncated",
    "too_long": "hidden_states.max_tokens (at most the target's context)",
    "no_supervised_text": "datasets.{dataset}.loss_on, or kind: prompts",
    "template_error": "the dataset's layout, or the target; the job's log shows the first error",
    "content_lost": "the target: its template leaves out or changes what is said; the log shows where",
    "tool_calls_lost": "the target: its template has no tool calls; or leave out the rows that have some",
    "reasoning_lost": "the target: its template has no reasoning; or kind: prompts, to have it answer anew",
    "reasoning_unclear": "the dataset's layout: answers have half of a pair of <think> and </think>",
    "no_end_of_turn": "the target: its template doesn't end a turn that calls tools",
}


def read_chats(path: Path) -> list[dict[str, Any]]:
    """The rows of prompts.jsonl or conversations.jsonl, by id. Raises RecordError."""
    rows = list(read_jsonl(path))
    for row in rows:
        missing = [name for name in ("id", "group", "messages") if not row.get(name)]
        if missing:
            raise RecordError(
                f"{path}: a row (id {row.get('id')!r}) lacks {', '.join(missing)}; "
                "expected the rows that scripts/build_prompts.py writes"
            )
    return sorted(rows, key=lambda row: row["id"])


def read_target(path: Path, chat: Chat) -> dict[str, Any]:
    """What target.json holds. Raises ConfigError where the target's folder has another template by now."""
    target: dict[str, Any] = read_json(path)
    if target["template_sha256"] != chat.template_sha256:
        raise ConfigError(
            f"{path} tells of another chat template than the target's folder has; "
            "run scripts/identify_target.py again"
        )
    return target


def sample_row(
    dataset: str,
    chat: Mapping[str, Any],
    ids: list[int],
    loss_mask: list[int],
    finish_reason: str,
    split: SplitSettings,
) -> dict[str, Any]:
    """One row of tokenized_data.jsonl, made from a row of prompts or conversations."""
    return {
        "id": chat["id"],
        "dataset": dataset,
        "group": chat["group"],
        "split": share_of(dataset, chat["group"], split),
        "input_ids": ids,
        "loss_mask": loss_mask,
        "finish_reason": finish_reason,
    }


def count_tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a ledger says of the kept rows: rows, tokens and supervised tokens of each share."""
    samples: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    supervised: Counter[str] = Counter()
    for row in rows:
        samples[row["split"]] += 1
        tokens[row["split"]] += len(row["input_ids"])
        supervised[row["split"]] += sum(row["loss_mask"])
    counts = {"samples": samples, "tokens": tokens, "supervised_tokens": supervised}
    return {
        name: {share: count[share] for share in ("train", "validation", "held_out")}
        for name, count in counts.items()
    }


def check_samples(dataset: str, ledger: Ledger, gates: GateSettings) -> None:
    """Stop a dataset of which too few rows became samples. Raises GateError.

    Answers left out because they were cut are the build's own wish and don't count against the share.
    """
    judged = ledger.rows - ledger.skipped["truncated"]
    share = ledger.kept / judged if judged else 0.0
    if ledger.kept >= gates.min_kept and share >= gates.min_kept_share:
        return
    reasons = sorted(ledger.skipped.items(), key=lambda item: (-item[1], item[0]))
    seen = ", ".join(f"{count} {reason}" for reason, count in reasons if count) or "no row at all"
    remedy = _REMEDIES[reasons[0][0]].format(dataset=dataset) if reasons else "the dataset's prompts"
    raise GateError(
        f"dataset {dataset}\n"
        f"  seen: {ledger.kept} of {ledger.rows} rows became samples; skipped: {seen}\n"
        f"  expected: at least {gates.min_kept} samples and {gates.min_kept_share:.0%} of the rows\n"
        f"  change: {remedy}; or {config_line(['datasets', dataset, 'gates'])} if so few are right"
    )
