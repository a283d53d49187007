"""Let the target answer a dataset's prompts, and keep the hidden states of the pass that did it.

Inputs: prompts.jsonl, target.json and the target's folder. Outputs: tokenized_data.jsonl, one row a prompt
with the token ids of prompt and answer, and ledger.json.

Finished work goes to the store batch by batch, first the states and then the answers: an answer that is
there has its states there. Stopped at any point, the command goes on where it was; an answer in the store
is never asked for again. The model is loaded only when an answer is missing.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.chat import Chat, ChatError
from eyrie.config import (
    EngineSettings,
    GateSettings,
    HiddenStatesSettings,
    SamplingSettings,
    Settings,
    SplitSettings,
    parse_settings,
)
from eyrie.console import Progress, run_command, start_log
from eyrie.engines.in_process import InProcessEngine, check_against_reference
from eyrie.gates import check_answers, check_samples
from eyrie.provenance import manifest_header
from eyrie.records import Ledger, content_key, write_json, write_jsonl
from eyrie.states import states_recipe
from eyrie.store import Journal, StateStore, answers_folder, read_journals
from eyrie.target import Target
from eyrie.tokenized import count_tokens, read_chats, read_target, sample_row


class AnsweringRecipe(Settings):
    """What the answers depend on beside prompts and target, and what becomes of them."""

    version: int
    dtype: str
    sampling: SamplingSettings
    split: SplitSettings
    gates: GateSettings


@dataclass(frozen=True)
class Prompt:
    """A row of prompts.jsonl as token ids; the key of its answer is the hash of the ids."""

    chat: Mapping[str, Any]
    ids: list[int]
    key: str


def read_prompts(path: Path, chat: Chat, longest: int, ledger: Ledger, log: logging.Logger) -> list[Prompt]:
    """The prompts of at most `longest` tokens, by id; the ledger counts the others."""
    prompts = []
    for row in read_chats(path):
        try:
            ids = chat.prompt_ids(row["messages"], row.get("tools"))
        except ChatError as error:
            if not ledger.skipped["template_error"]:
                log.warning("prompt %s: %s", row["id"], error)
            ledger.skip("template_error")
            continue
        if len(ids) > longest:
            ledger.skip("prompt_too_long")
        else:
            prompts.append(Prompt(row, ids, content_key(ids)))
    return prompts


class Answers:
    """The answers of one dataset: in the store, or made and put there."""

    def __init__(self, dataset: str, folder: Path, states: StateStore) -> None:
        self._dataset = dataset
        self._folder = folder
        self._states = states

    def find(self, prompts: Mapping[str, list[int]]) -> dict[str, dict[str, Any]]:
        """The answers that the store has, by key; the dataset's own come before other datasets'."""
        own = read_journals(self._folder, prompts, f"{self._dataset}.jsonl")
        return read_journals(self._folder, prompts.keys() - own.keys()) | own

    def make_missing(
        self,
        prompts: Mapping[str, list[int]],
        recipe: AnsweringRecipe,
        kept_states: HiddenStatesSettings,
        path: Path,
        engine: EngineSettings,
        log: logging.Logger,
    ) -> None:
        """Answer the prompts {key: token ids} that have no answer in the store."""
        if len(self.find(prompts)) == len(prompts):
            return
        journal = Journal(self._folder / f"{self._dataset}.jsonl")
        with self._states.writer(self._dataset) as writer, journal:
            found = self.find(prompts)
            missing = [(key, ids) for key, ids in prompts.items() if key not in found]
            target = Target(path, recipe.dtype, kept_states.layer_ids)
            progress = Progress(len(missing), "answers", log)
            tokens = 0
            for batch in InProcessEngine(target, engine).answer(missing, recipe.sampling, kept_states.dtype):
                if not tokens:
                    log.info(
                        "states differ from the reference by %.4f",
                        check_against_reference(target, batch[0].states),
                    )
                writer.add([answered.states for answered in batch])
                journal.append(
                    [
                        {
                            "key": answered.key,
                            "token_ids": answered.token_ids,
                            "finish_reason": answered.finish_reason,
                        }
                        for answered in batch
                    ]
                )
                tokens += sum(len(answered.token_ids) for answered in batch)
                progress.advance(len(batch), f"({tokens} tokens)")
            seconds = progress.close()
            log.info(
                "answered %d prompts: %d tokens in %.1f s, %.0f tokens/s",
                len(missing),
                tokens,
                seconds,
                tokens / seconds,
            )


def make_rows(
    dataset: str,
    prompts: list[Prompt],
    answers: Mapping[str, Mapping[str, Any]],
    recipe: AnsweringRecipe,
    ledger: Ledger,
) -> list[dict[str, Any]]:
    """The samples of the prompts, in their order; the ledger counts answers that are left out."""
    rows = []
    greedy = recipe.sampling.temperature == 0.0
    for prompt in prompts:
        answer = answers[prompt.key]
        if answer["finish_reason"] == "length" and not recipe.sampling.keep_truncated:
            ledger.skip("truncated")
            continue
        ledger.keep()
        ids = answer["token_ids"]
        mask = [0] * len(prompt.ids) + [1] * len(ids)
        rows.append(
            sample_row(
                dataset, prompt.chat, prompt.ids + ids, mask, answer["finish_reason"], greedy, recipe.split
            )
        )
    return rows


def main() -> None:
    """The command."""
    arguments = _arguments()
    log = start_log("answer_prompts", arguments.log)
    start = time.monotonic()
    recipe = parse_settings(AnsweringRecipe, arguments.recipe)
    chat = Chat(arguments.target_path)
    target = read_target(arguments.target, chat)

    ledger = Ledger()
    longest = target["max_position_embeddings"] - recipe.sampling.max_new_tokens
    prompts = read_prompts(arguments.prompts, chat, longest, ledger, log)
    by_key = {prompt.key: prompt.ids for prompt in prompts}
    asked = {
        "version": recipe.version,
        "target_revision": target["revision"],
        "template_sha256": target["template_sha256"],
        "dtype": recipe.dtype,
        "sampling": recipe.sampling.model_dump(mode="json", exclude={"keep_truncated", "max_in_flight"}),
    }
    kept_states = parse_settings(HiddenStatesSettings, arguments.states)
    states = StateStore(arguments.store, states_recipe(target, kept_states, recipe.dtype))
    answers = Answers(arguments.dataset, answers_folder(arguments.store, asked), states)
    engine = parse_settings(EngineSettings, arguments.engine)
    answers.make_missing(by_key, recipe, kept_states, arguments.target_path, engine, log)
    found = answers.find(by_key)

    reasons = Counter(found[prompt.key]["finish_reason"] for prompt in prompts)
    warnings = check_answers(arguments.dataset, len(prompts), reasons["length"], 0, recipe.gates)
    rows = make_rows(arguments.dataset, prompts, found, recipe, ledger)
    warnings += check_samples(arguments.dataset, ledger, recipe.gates)
    write_jsonl(arguments.out, rows)
    write_json(
        arguments.ledger,
        {
            **manifest_header(
                "answer_prompts",
                recipe.model_dump(mode="json"),
                [arguments.prompts, arguments.target],
                ["torch", "transformers"],
            ),
            "dataset": arguments.dataset,
            **ledger.as_dict(),
            "warnings": warnings,
            **count_tokens(rows),
            "finish_reasons": {reason: reasons[reason] for reason in ("stop", "length")},
        },
    )
    log.info(
        "%s: %d prompts, %d samples (%d answers ended, %d were cut), %.1f s",
        *(arguments.dataset, ledger.rows, ledger.kept, reasons["stop"], reasons["length"]),
        time.monotonic() - start,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", required=True, help="the dataset's name in the configuration")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts.jsonl")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target")
    parser.add_argument("--recipe", required=True, help="JSON: what the answers depend on")
    parser.add_argument(
        "--states", required=True, help="JSON: which hidden states the pass leaves in the store"
    )
    parser.add_argument("--engine", required=True, help="JSON: threads and batches, which change no result")
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--out", type=Path, required=True, help="tokenized_data.jsonl")
    parser.add_argument("--ledger", type=Path, required=True, help="counts of rows kept and skipped")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
