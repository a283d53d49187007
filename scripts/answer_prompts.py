"""Let the target answer a dataset's prompts.

Inputs: prompts.jsonl, target.json and the target's folder. Outputs: tokenized_data.jsonl, one row a prompt
with the token ids of prompt and answer, and ledger.json.

Finished answers go to the store as they come, whatever their order; the rows are in the order of the prompts.
Stopped at any point, the command goes on where it was; an answer in the store is never asked for again. An
engine is opened only when an answer is missing. Where the target runs in this process, or a server leaves
them (engine.capture: answers), the hidden states of the pass that answered go to the store, too, before the
answers: an answer that is there has its states there.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.budget import check_room_for_answers
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
from eyrie.console import run_command, start_log
from eyrie.conversations import Conversation, Followers
from eyrie.degenerate import is_degenerate
from eyrie.engines import Answered, Engine, Follow, Prompt, Result
from eyrie.engines.canary import CANARY_MESSAGES
from eyrie.engines.opening import Wanted, open_engine
from eyrie.gates import check_answers, check_samples
from eyrie.journals import FoundRows, Journal, answers_folder, find_rows
from eyrie.progress import AnsweringProgress
from eyrie.provenance import manifest_header
from eyrie.recipes import answers_recipe
from eyrie.records import Ledger, content_key, read_json, write_json, write_jsonl
from eyrie.states import states_recipe
from eyrie.stopping import Stopped, StopRequest, end_with_snakemake
from eyrie.tokenized import TokenCounts, open_target, read_chats, sample_row
from eyrie.turns import Dialogue

if TYPE_CHECKING:
    from eyrie.store import StateWriter


class AnsweringRecipe(Settings):
    """What the answers depend on beside prompts and target, and what becomes of them."""

    version: int
    dtype: str
    """In-process only, and no part of an answer's key: one that is in the store stays."""
    sampling: SamplingSettings
    split: SplitSettings
    gates: GateSettings


def read_prompts(
    path: Path, chat: Chat, longest: int, ledger: Ledger, log: logging.Logger
) -> list[Conversation]:
    """Those whose first prompt has at most `longest` tokens, by id; the ledger counts the others."""
    prompts = []
    for row in read_chats(path):
        dialogue = Dialogue(chat, row)
        try:
            ids = dialogue.first_prompt()
        except ChatError as error:
            if not ledger.skipped["template_error"]:
                log.warning("prompt %s: %s", row["id"], error)
            ledger.skip("template_error")
            continue
        if len(ids) > longest:
            ledger.skip("prompt_too_long")
        else:
            # As an array: a list of Python's own numbers takes ten times the memory. A single turn needs no
            # messages any more.
            further = dialogue if len(dialogue) > 1 else None
            prompts.append(
                Conversation(row["id"], row["group"], array("I", ids), content_key(ids), further, longest)
            )
    return prompts


class Answers:
    """The answers of one dataset: in the store, or made and put there."""

    def __init__(self, dataset: str, folder: Path) -> None:
        self._dataset = dataset
        self._folder = folder

    def find(self, keys: Sequence[str]) -> FoundRows:
        """The answers that the store has; the dataset's own come before other datasets'."""
        return find_rows(self._folder, keys, first=f"{self._dataset}.jsonl")

    def missing(self, prompts: Mapping[str, Sequence[int]]) -> list[Prompt]:
        """The prompts {key: token ids} that have no answer in the store."""
        with self.find(list(prompts)) as found:
            return [(key, ids) for key, ids in prompts.items() if key not in found]

    def journal(self) -> Journal:
        """The dataset's journal, to be opened for writing."""
        return Journal(self._folder / f"{self._dataset}.jsonl")

    def canaries(self) -> Path:
        """The folder of the servers' canaries."""
        return self._folder / "canaries"

    def note_engine(self, description: Mapping[str, Any]) -> None:
        """Keep beside the answers what gave them; a rerun that asks nothing tells it all the same."""
        name = f"{self._dataset}-{content_key(description)}.json"
        write_json(self._folder / "engines" / name, description)

    def engines(self) -> list[dict[str, Any]]:
        """What gave the dataset's answers, of all runs."""
        return [read_json(path) for path in sorted(self._folder.glob(f"engines/{self._dataset}-*.json"))]


class Answering:
    """One run that makes the missing answers: the engine, where its results go, and who is told of them."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        states: StateWriter | None,
        progress: AnsweringProgress,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._states = states
        self._progress = progress
        self.failed: dict[str, str] = {}
        """Why a key got no answer."""

    def run(
        self, prompts: Sequence[Prompt], sampling: SamplingSettings, follow: Follow | None = None
    ) -> None:
        """Answer the prompts, and those that follow; every group is durable before the next is taken."""
        state = "failed"
        try:
            for group in self._engine.answer(prompts, sampling, follow):
                self._keep(group)
                self._progress.update(group, self._engine)
            state = "done"
        except (Stopped, KeyboardInterrupt):
            state = "stopped"
            raise
        finally:
            self._progress.close(self._engine, state)

    def _keep(self, group: Sequence[Result]) -> None:
        answered = [one for one in group if isinstance(one, Answered)]
        if self._states is not None:
            self._states.add([one.states for one in answered if one.states is not None])
        if answered:
            self._journal.append(
                [
                    {"key": one.key, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
                    for one in answered
                ]
            )
        self.failed |= {one.key: one.reason for one in group if not isinstance(one, Answered)}


def make_all(
    answers: Answers,
    conversations: Sequence[Conversation],
    wanted: Wanted,
    arguments: argparse.Namespace,
    log: logging.Logger,
) -> tuple[list[str], dict[str, str]]:
    """Answer every turn that has no answer in the store; all keys that were asked, and why some have none.

    Turns that follow are asked as soon as they can be. What is still open then (of conversations that begin
    alike one was followed) is asked in another round.
    """
    prompts = {one.key: one.ids for one in conversations}
    failed: dict[str, str] = {}
    while True:
        with answers.find(list(prompts)) as found:
            open_turns = {
                turn.key: turn.ids
                for one in conversations
                if (turn := one.open_turn(found)) is not None and turn.key not in failed
            }
            if not open_turns:
                return list(prompts), failed
            # Turns met for the first time were not looked up yet.
            looked_up = open_turns.keys() <= prompts.keys()
            prompts |= open_turns
            if not looked_up:
                continue
            followers = Followers(conversations, found)
        failed |= make_missing(answers, open_turns, followers, wanted, arguments, log)


def make_missing(
    answers: Answers,
    prompts: Mapping[str, Sequence[int]],
    follow: Follow,
    wanted: Wanted,
    arguments: argparse.Namespace,
    log: logging.Logger,
) -> dict[str, str]:
    """Answer the prompts {key: token ids} that have no answer in the store; why others got none, by key."""
    settings = parse_settings(EngineSettings, arguments.engine)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(settings.stop_grace))
        journal = stack.enter_context(answers.journal())
        store = states = None
        if settings.kind == "in_process" or settings.capture == "answers":
            from eyrie.store import StateStore  # noqa: PLC0415 - loads torch, which servers don't need

            store = StateStore(arguments.store, states_recipe(wanted.target, wanted.states, wanted.dtype))
            states = stack.enter_context(store.writer(arguments.dataset))
        sampling = wanted.sampling
        if arguments.in_flight is not None:
            at_once = json.loads(arguments.in_flight)[arguments.dataset]
            sampling = sampling.model_copy(update={"max_in_flight": at_once})
        # Looked up again now that nobody else can add to them.
        missing = answers.missing(prompts)
        if states is not None:
            lengths = [len(ids) for _, ids in missing]
            longest = wanted.sampling.max_new_tokens
            check_room_for_answers(
                arguments.store, lengths, longest, wanted.states, wanted.target, arguments.dataset, log
            )
        engine = stack.enter_context(open_engine(settings, wanted, stop))
        answers.note_engine(engine.described())
        if store is not None:
            from eyrie.engines.proving import prove_answers  # noqa: PLC0415 - loads torch

            prove_answers(store, arguments.dataset, engine, wanted)
        progress = AnsweringProgress(arguments.dataset, len(missing), log, _progress_path(arguments.log))
        answering = Answering(engine, journal, states, progress)
        answering.run(missing, sampling, follow)
        return answering.failed


def _progress_path(log: Path | None) -> Path | None:
    return None if log is None else log.with_suffix(".progress.json")


class Rows:
    """The samples of the prompts, in their order, and all that is counted on the way."""

    def __init__(self, dataset: str, recipe: AnsweringRecipe, ledger: Ledger) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._ledger = ledger
        self.reasons: Counter[str] = Counter()
        """Answers by finish reason, kept or not, `degenerate` ones, all `turns`, and those that `failed`."""
        self.counts = TokenCounts()
        self.warnings: list[str] = []

    def made(
        self,
        conversations: Sequence[Conversation],
        answers: Mapping[str, Mapping[str, Any]],
        failed: Mapping[str, str],
    ) -> Iterator[dict[str, Any]]:
        """Each conversation's row, unless its answer failed or is left out; the gates judge after the last.

        Where a later turn failed, the row holds those before it. Raises GateError at the end, so that a file
        of these rows is never finished.
        """
        sampling, greedy = self._recipe.sampling, self._recipe.sampling.temperature == 0.0
        for one in conversations:
            asked = list(one.turns(answers))
            given = [turn.answer for turn in asked if turn.answer is not None]
            self.reasons["turns"] += len(one)
            self.reasons["failed"] += len(asked) - len(given)
            if not given:
                self._ledger.skip(f"failed:{failed[one.key]}")
                continue
            loops = [is_degenerate(answer["token_ids"]) for answer in given]
            self.reasons.update(answer["finish_reason"] for answer in given)
            self.reasons["degenerate"] += sum(loops)
            finish, degenerate = given[-1]["finish_reason"], any(loops)
            if finish == "length" and not sampling.keep_truncated:
                self._ledger.skip("truncated")
            elif degenerate and sampling.drop_degenerate:
                self._ledger.skip("degenerate")
            else:
                self._ledger.keep()
                ids, mask = one.sample(given)
                chat = {"id": one.id, "group": one.group}
                row = sample_row(self._dataset, chat, ids, mask, finish, greedy, self._recipe.split)
                self.counts.add(row)
                yield row
        self._judge()

    def _judge(self) -> None:
        gates, answered = self._recipe.gates, self.reasons["stop"] + self.reasons["length"]
        counts = answered, self.reasons["length"], self.reasons["failed"]
        self.warnings += check_answers(self._dataset, *counts, gates)
        self.warnings += check_samples(self._dataset, self._ledger, gates)


def main() -> None:
    """The command."""
    arguments = _arguments()
    end_with_snakemake()
    log = start_log("answer_prompts", arguments.log)
    start = time.monotonic()
    recipe = parse_settings(AnsweringRecipe, arguments.recipe)
    target, chat = open_target(arguments.target, arguments.target_path)

    ledger = Ledger()
    longest = target["max_position_embeddings"] - recipe.sampling.max_new_tokens
    conversations = read_prompts(arguments.prompts, chat, longest, ledger, log)
    several_turns = any(len(one) > 1 for one in conversations)
    context = longest if several_turns else max((len(one.ids) for one in conversations), default=0)
    asked = answers_recipe(target, recipe.version, recipe.sampling)
    answers = Answers(arguments.dataset, answers_folder(arguments.store, asked))
    wanted = Wanted(
        target=target,
        path=arguments.target_path,
        dtype=recipe.dtype,
        states=parse_settings(HiddenStatesSettings, arguments.states),
        sampling=recipe.sampling,
        context=context + recipe.sampling.max_new_tokens,
        canary_prompt=chat.prompt_ids(CANARY_MESSAGES),
        canaries=answers.canaries(),
        server_log=(arguments.log or arguments.out).with_suffix(".server.log"),
        arriving=arguments.store / "arriving" / arguments.dataset,
    )
    keys, failed = make_all(answers, conversations, wanted, arguments, log)

    rows = Rows(arguments.dataset, recipe, ledger)
    with answers.find(keys) as found:
        write_jsonl(arguments.out, rows.made(conversations, found, failed))
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
            "engines": answers.engines(),
            **ledger.as_dict(),
            "warnings": rows.warnings,
            **rows.counts.as_dict(),
            "finish_reasons": {reason: rows.reasons[reason] for reason in ("stop", "length")},
            "degenerate": rows.reasons["degenerate"],
            "turns": {name: rows.reasons[name] for name in ("turns", "failed")},
        },
    )
    log.info(
        "%s: %d prompts, %d samples (%d answers ended, %d were cut, %d are loops), %.1f s",
        *(arguments.dataset, ledger.rows, ledger.kept, rows.reasons["stop"], rows.reasons["length"]),
        *(rows.reasons["degenerate"], time.monotonic() - start),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", required=True, help="the dataset's name in the configuration")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts.jsonl")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target")
    parser.add_argument("--recipe", required=True, help="JSON: what the answers depend on")
    parser.add_argument(
        "--states", required=True, help="JSON: which hidden states an in-process pass leaves in the store"
    )
    parser.add_argument("--engine", required=True, help="JSON: who answers, which changes no key")
    parser.add_argument(
        "--in-flight", help="JSON: requests at once to each server, by dataset; else as the recipe says"
    )
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    parser.add_argument("--out", type=Path, required=True, help="tokenized_data.jsonl")
    parser.add_argument("--ledger", type=Path, required=True, help="counts of rows kept and skipped")
    parser.add_argument(
        "--log", type=Path, help="also write the log to this file, and progress.json's figures beside it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
