"""Turn native conversations, whose answers are kept, into token ids and loss masks.

Inputs: conversations.jsonl, target.json and the target's folder (its tokenizer and chat template are used).
Outputs: tokenized_data.jsonl, one row a conversation, or one for each turn of the assistant where the
target's template rewrites its history (see eyrie/chat); and ledger.json.

Rows that came with token ids keep them and their mask, as long as the target has such ids.

Answers of another model than the target teach the drafter another model's words: this is refused, or said
in the log and the ledger where the configuration wants it.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eyrie.chat import Chat, ChatError, ChatRow, LossOn
from eyrie.config import ConfigError, GateSettings, Settings, SplitSettings, config_line, parse_settings
from eyrie.console import run_command, start_log
from eyrie.gates import check_samples
from eyrie.provenance import manifest_header
from eyrie.records import Ledger, write_json, write_jsonl
from eyrie.tokenized import count_tokens, open_target, read_chats, sample_row


class TokenizingRecipe(Settings):
    """What the samples of a native dataset depend on beside conversations and target."""

    version: int
    loss_on: LossOn
    max_tokens: int
    native_model: str
    on_native_mismatch: Literal["refuse", "warn"]
    split: SplitSettings
    gates: GateSettings


def is_target(native_model: str, target: Mapping[str, Any]) -> bool:
    """Whether a model's name is the target's name or hub id; owner and case don't matter."""
    names = {_short(name) for name in (target["name"], target["hub_id"]) if name}
    return _short(native_model) in names


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def check_native_model(
    dataset: str, recipe: TokenizingRecipe, target: Mapping[str, Any], log: logging.Logger
) -> bool:
    """Whether the target wrote the answers. Raises ConfigError where that is asked for and not so."""
    if is_target(recipe.native_model, target):
        return True
    where = config_line(["datasets", dataset, "native_model"])
    words = (
        f"{where}: the answers are {recipe.native_model}'s, the target is "
        f"{target['hub_id'] or target['name']}; a drafter learns from the target's own answers"
    )
    if recipe.on_native_mismatch == "refuse":
        raise ConfigError(
            f"{words}.\n  change: kind: prompts, so that the target answers anew, or "
            f"datasets.{dataset}.on_native_mismatch: warn to use the answers all the same"
        )
    log.warning("%s", words)
    return False


def tokenize(
    dataset: str,
    path: Path,
    chat: Chat,
    recipe: TokenizingRecipe,
    target: Mapping[str, Any],
    ledger: Ledger,
    turns: Ledger,
    log: logging.Logger,
) -> list[dict[str, Any]]:
    """The conversations as samples no longer than recipe and target allow, by id.

    ledger counts conversations, one that gives a sample as kept; turns counts the rows of the conversations
    that the target's template makes one of for each turn. Their ids are ID-0, ID-1 and so on, by turn.
    """
    longest = min(recipe.max_tokens, target["max_position_embeddings"])
    samples = []
    for row in read_chats(path):
        try:
            if "input_ids" in row:
                made = [given_tokens(row, target["vocab_size"])]
            else:
                made = chat.rows(row["messages"], row.get("tools"), recipe.loss_on)
        except ChatError as error:
            if not ledger.skipped[error.reason]:
                log.warning("conversation %s: %s: %s", row["id"], error.reason, error)
            ledger.skip(error.reason)
            continue
        kept = []
        for one in made:
            reason = _why_not(one, longest)
            if reason is None:
                kept.append(one)
            if one.turn is not None:
                turns.keep() if reason is None else turns.skip(reason)
        if not kept:
            ledger.skip(_why_not(made[0], longest) or "")
            continue
        ledger.keep()
        for one in kept:
            name = row if one.turn is None else {**row, "id": f"{row['id']}-{one.turn}"}
            samples.append(sample_row(dataset, name, one.ids, one.loss_mask, "native", False, recipe.split))
    return sorted(samples, key=lambda sample: sample["id"])


def given_tokens(row: Mapping[str, Any], vocab_size: int) -> ChatRow:
    """The row of a conversation that others tokenized. Raises ChatError for ids that the target lacks."""
    largest = max(row["input_ids"])
    if largest >= vocab_size:
        raise ChatError(f"token id {largest}, but the target has {vocab_size}", "foreign_token_id")
    return ChatRow(row["input_ids"], row["loss_mask"])


def _why_not(row: ChatRow, longest: int) -> str | None:
    """The reason to leave a row out; None for a good one."""
    if len(row.ids) > longest:
        return "too_long"
    return None if any(row.loss_mask) else "no_supervised_text"


def main() -> None:
    """The command."""
    arguments = _arguments()
    log = start_log("tokenize_conversations", arguments.log)
    start = time.monotonic()
    recipe = parse_settings(TokenizingRecipe, arguments.recipe)
    target, chat = open_target(arguments.target, arguments.target_path)
    own = check_native_model(arguments.dataset, recipe, target, log)

    ledger, turns = Ledger(), Ledger()
    rows = tokenize(arguments.dataset, arguments.conversations, chat, recipe, target, ledger, turns, log)
    warnings = check_samples(arguments.dataset, ledger, recipe.gates)
    write_jsonl(arguments.out, rows)
    write_json(
        arguments.ledger,
        {
            **manifest_header(
                "tokenize_conversations",
                recipe.model_dump(mode="json"),
                [arguments.conversations, arguments.target],
                ["tokenizers", "transformers"],
            ),
            "dataset": arguments.dataset,
            "native_model": recipe.native_model,
            "native_model_is_target": own,
            "loss_on": recipe.loss_on,
            **ledger.as_dict(),
            "warnings": warnings,
            "turns": turns.as_dict(),
            **count_tokens(rows),
        },
    )
    tokens = sum(len(row["input_ids"]) for row in rows)
    seconds = time.monotonic() - start
    log.info(
        "%s: %d conversations, %d samples of %d tokens, %.1f s, %.0f tokens/s",
        *(arguments.dataset, ledger.rows, len(rows), tokens, seconds, tokens / max(seconds, 1e-9)),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", required=True, help="the dataset's name in the configuration")
    parser.add_argument("--conversations", type=Path, required=True, help="conversations.jsonl")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target")
    parser.add_argument("--recipe", required=True, help="JSON: what the samples depend on")
    parser.add_argument("--out", type=Path, required=True, help="tokenized_data.jsonl")
    parser.add_argument("--ledger", type=Path, required=True, help="counts of rows kept and skipped")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
