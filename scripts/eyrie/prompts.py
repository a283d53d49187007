"""From raw rows to prompts or native conversations: what is kept, why the rest is not, and the ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from eyrie.config import ConfigError, DatasetSettings, config_line
from eyrie.contamination import Benchmarks
from eyrie.gates import GateError, check_rows
from eyrie.layouts import load_layout
from eyrie.layouts.base import Layout, Message, SkipRow, Tokens, column
from eyrie.media import MEDIA_COLUMNS, without_media
from eyrie.near_duplicates import NearDuplicates
from eyrie.questions import (
    asked,
    asked_turns,
    check_conversation,
    prompt_id,
    turns_id,
    until_last_answer,
)
from eyrie.raw_files import RawError, Seen, column_names, row_groups
from eyrie.records import (
    Ledger,
    RecordError,
    atomic_write,
    content_key,
    json_line,
    read_json,
    sha256_file,
    write_json,
    write_jsonl,
)
from eyrie.selection import InTurn, LowestHashes, Selection

_ROWS_BETWEEN_LINES = 100_000
_EXAMPLES = 3


class Prompts:
    """The build of one dataset's prompts or conversations, from its fetched files to its ledger."""

    def __init__(
        self,
        dataset: str,
        settings: DatasetSettings,
        source: Path,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        """source: the dataset's source.json. made_by: the head of the ledger, which says how it was made.

        Raises ConfigError for a layout or a field there is not, RecordError for raw files that changed since
        they were fetched.
        """
        self._made_by = made_by or {}
        self._dataset = dataset
        self._settings = settings
        self._layout = _layout(dataset, settings)
        self._source: list[dict[str, Any]] = read_json(source)["files"]
        self._files = _verified_files(source, self._source)
        self._ledger = Ledger()
        self._warnings: list[str] = []
        benchmarks = settings.decontaminate
        self._benchmarks = None if benchmarks is None else Benchmarks(dataset, benchmarks)
        self._seen = Seen(column_names(self._files, settings.source.format))
        self._examples: dict[str, list[dict[str, Any]]] = {}
        self._read = 0
        self._turns = 0

    def write(self, out: Path, ledger: Path, rejects: Path) -> Ledger:
        """Read all rows and write the kept ones sorted by id, the ledger, and every rejected row.

        Raises GateError when the rows are not what a gate asks for; then none of the three appears, and
        `<ledger>.failed.json` holds the counts and some of the rejected rows.
        """
        failed = ledger.with_name(f"{ledger.name}.failed.json")
        selection = self._selection(out.parent)
        with atomic_write(rejects) as file:
            for reject in self._rejects(selection):
                self._ledger.skip(reject["reason"])
                file.write(_reject_line(reject))
                examples = self._examples.setdefault(reject["reason"], [])
                if len(examples) < _EXAMPLES:
                    examples.append(reject)
            selected = selection.in_order()
            self._ledger.kept = len(selected)
            self._turns = sum(len(row.get("turns", ())) for row in selected)
            self._check_accounts()
            self._check_gates(selection, failed)
        write_jsonl(out, selected)
        write_json(ledger, self._ledger_document(selection))
        failed.unlink(missing_ok=True)
        return self._ledger

    def _selection(self, folder: Path) -> Selection:
        """Who chooses among the readable rows; those that must wait for it wait in the folder."""
        settings = self._settings
        if settings.near_duplicates is None and settings.max_per_group is None:
            return LowestHashes(settings.samples)
        alike = settings.near_duplicates
        near = None if alike is None else NearDuplicates(alike.threshold, alike.words)
        return InTurn(folder, settings.samples, settings.max_per_group, near)

    def _rejects(self, selection: Selection) -> Iterator[dict[str, Any]]:
        """Reads all rows; those not selected come out, each with its reason."""
        source = self._settings.source
        for group in row_groups(self._files, source.format, self._columns(), source.max_expansion):
            for judged in [self._judged(position, raw) for position, raw in group]:
                self._read += 1
                if self._read % _ROWS_BETWEEN_LINES == 0:
                    logging.getLogger(__name__).info("%s: %d rows read", self._dataset, self._read)
                if isinstance(judged, dict):
                    yield judged
                elif left := selection.offer(*judged):
                    yield {"reason": left.reason, "position": left.position, "id": left.id}
        for left in selection.finish():
            yield {"reason": left.reason, "position": left.position, "id": left.id}

    def _judged(self, position: str, raw: Any) -> tuple[dict[str, Any], str, list[str]] | dict[str, Any]:
        """What is offered to the selection (row, position, notes), or the reject that a raw row becomes."""
        if isinstance(raw, RawError):
            return {"reason": raw.reason, "position": position, "row": raw.text, "error": raw.message}
        self._seen.note(raw)
        try:
            row, notes = self._row(raw)
        except SkipRow as skip:
            return {"reason": skip.reason, "position": position, "row": raw}
        if self._benchmarks is not None and (shared := self._shared(row, self._benchmarks)):
            return {"reason": "contaminated", "position": position, "row": raw, "shared": shared}
        return row, position, notes

    def _shared(self, row: dict[str, Any], benchmarks: Benchmarks) -> str | None:
        """The words that one of a row's questions shares with a benchmark, if any."""
        if "messages" not in row:
            where = config_line(["datasets", self._dataset, "decontaminate"])
            raise ConfigError(f"{where}: compares texts, but the rows of this dataset are token ids")
        questions = [made["content"] for made in row["messages"] if made["role"] == "user"]
        return benchmarks.shared(questions)

    def _columns(self) -> set[str]:
        """What is read of a parquet file: the layout's columns, the group's, and signs of media."""
        settings = self._settings
        names = {settings.fields.get(name, name) for name in (*self._layout.COLUMNS, *self._layout.OPTIONAL)}
        names |= {settings.group_by} if settings.group_by else set()
        return names | {name.split(".")[0] for name in names} | set(MEDIA_COLUMNS)

    def _row(self, raw: Any) -> tuple[dict[str, Any], list[str]]:
        """The row of the output file, and what was mended in it. Raises SkipRow."""
        settings = self._settings
        native = settings.kind == "native"
        plain, had_media = without_media(raw) if settings.media == "text_only" else (raw, False)
        try:
            conversation = self._layout.read(plain, settings.fields)
        except ConfigError as error:
            raise ConfigError(f"{config_line(['datasets', self._dataset, 'fields'])}: {error}") from error
        notes = [*conversation.notes]
        if had_media:
            notes.append("media_left_out")
        if conversation.tokens is not None:
            return self._tokens_row(raw, conversation.tokens), notes
        prompt = check_conversation(conversation.messages, native)
        first_id = prompt_id(prompt)
        row = self._identity(raw, first_id, first_id)
        with_system = settings.prompt == "system_and_first_user"
        if native:
            messages = until_last_answer(conversation.messages)
            if len(messages) < len(conversation.messages):
                notes.append("cut_after_last_answer")
        elif settings.turns == "first":
            messages = asked(conversation.messages, with_system)
        else:
            turns = asked_turns(conversation.messages, with_system)
            messages = [made for turn in turns for made in turn]
            row |= {"id": turns_id(messages), "turns": [len(turn) for turn in turns]}
        row["messages"] = messages
        if conversation.tools and not (conversation.system_declares_tools and _has_system(messages)):
            row["tools"] = conversation.tools
        return row, notes

    def _tokens_row(self, raw: Any, tokens: Tokens) -> dict[str, Any]:
        """The row of a conversation that others tokenized: it keeps their ids and mask."""
        if self._settings.kind != "native":
            raise SkipRow("pretokenized_prompt")
        if not any(tokens.loss_mask):
            raise SkipRow("no_supervised_text")
        prompt = tokens.input_ids[: tokens.loss_mask.index(1)]
        row_id = content_key("prompt", prompt)
        identity = self._identity(raw, row_id, row_id)
        return {**identity, "input_ids": tokens.input_ids, "loss_mask": tokens.loss_mask}

    def _identity(self, raw: Any, row_id: str, group: str) -> dict[str, Any]:
        """id, dataset and group; `group` is that of a dataset without a column for it."""
        if self._settings.group_by is not None:
            group = _group(raw, self._settings.group_by)
        return {"id": row_id, "dataset": self._dataset, "group": group}

    def _check_accounts(self) -> None:
        """Every row that was read is kept or skipped. Raises GateError: a fault of this program."""
        if self._read != self._ledger.rows:
            raise GateError(
                f"dataset {self._dataset}: {self._read} rows were read, but {self._ledger.kept} are kept and "
                f"{self._ledger.skipped.total()} skipped; please report this"
            )

    def _check_gates(self, selection: Selection, failed: Path) -> None:
        files = ", ".join(str(path) for path in self._files)
        expected = f"in each row: {self._layout.EXPECTED}"
        try:
            self._warnings = check_rows(
                self._dataset, f"{files}\n{self._seen}", self._ledger, self._settings, expected
            )
        except GateError as error:
            document = {**self._ledger_document(selection), "examples": self._examples}
            write_json(failed, _jsonable(document))
            raise GateError(f"{error}\n  rows that were skipped, some of each kind: {failed}") from error

    def _ledger_document(self, selection: Selection) -> dict[str, Any]:
        document = {
            **self._made_by,
            "dataset": self._dataset,
            "stage": "prompts",
            "source": {"files": self._source},
            **self._ledger.as_dict(),
            "notes": dict(sorted(selection.notes().items())),
            "warnings": self._warnings,
            "licence": self._settings.licence,
            "layout": self._settings.layout,
            "native_model": self._settings.native_model,
        }
        if self._settings.turns == "all":
            document["turns"] = self._turns
        if self._benchmarks is not None:
            document["benchmarks"] = self._benchmarks.described()
        return document


def _has_system(messages: list[Message]) -> bool:
    return any(made["role"] == "system" for made in messages)


def _group(raw: Any, name: str) -> str:
    value = column(raw, name)
    if value is None:
        raise SkipRow(f"missing_column:{name}")
    return content_key("group", _jsonable(value))


def _layout(dataset: str, settings: DatasetSettings) -> Layout:
    try:
        layout = load_layout(settings.layout)
    except ConfigError as error:
        raise ConfigError(f"{config_line(['datasets', dataset, 'layout'])}: {error}") from error
    known = (*layout.COLUMNS, *layout.OPTIONAL)
    for name in settings.fields:
        if name not in known:
            raise ConfigError(
                f"{config_line(['datasets', dataset, 'fields', name])}: saw {name!r}; layout "
                f"{settings.layout} has columns {', '.join(known)}"
            )
    return layout


def _verified_files(source: Path, files: list[dict[str, Any]]) -> list[Path]:
    paths = [source.parent / file["name"] for file in files]
    for path, file in zip(paths, files, strict=True):
        if not path.is_file() or sha256_file(path) != file["sha256"]:
            state = "was changed since it was fetched" if path.is_file() else "is missing"
            raise RecordError(
                f"{path}: {state}: {source} records other content. To fetch it again, delete {source}; "
                "to use a file of your own, name it in the dataset's source.files"
            )
    return paths


def _reject_line(reject: Mapping[str, Any]) -> bytes:
    """A line of rejects.jsonl."""
    if "row" not in reject:
        # A row that was not selected, as most are where there is a cap: this is what json_line makes of it.
        place = encode_basestring(reject["position"])
        return f'{{"reason":"{reject["reason"]}","position":{place},"id":"{reject["id"]}"}}\n'.encode()
    try:
        return json_line(reject)
    except (TypeError, ValueError):
        return json_line(_jsonable(reject))


def _jsonable(value: Any) -> Any:
    """The value, with what JSON has no form for (dates, bytes, NaN: parquet holds such) as text."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
