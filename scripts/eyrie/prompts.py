"""From raw rows to prompts or native conversations: what is kept, why the rest is not, and the ids."""

from __future__ import annotations

import heapq
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from eyrie.config import ConfigError, DatasetSettings, config_line
from eyrie.gates import GateError, check_kept_rows
from eyrie.layouts import load_layout
from eyrie.layouts.base import MEDIA_COLUMNS, Conversation, Layout, Message, SkipRow, column
from eyrie.raw_files import RawError, Seen, column_names, rows
from eyrie.records import (
    Ledger,
    RecordError,
    atomic_write,
    content_key,
    read_json,
    sha256_file,
    write_json,
    write_jsonl,
)

_ROWS_BETWEEN_LINES = 100_000
_EXAMPLES = 3


class Prompts:
    """The build of one dataset's prompts or conversations, from its fetched files to its ledger."""

    def __init__(self, dataset: str, settings: DatasetSettings, source: Path) -> None:
        """source: the dataset's source.json. Raises ConfigError for a layout or a field there is not,
        RecordError for raw files that changed since they were fetched."""
        self._dataset = dataset
        self._settings = settings
        self._layout = _layout(dataset, settings)
        self._source: list[dict[str, Any]] = read_json(source)["files"]
        self._files = _verified_files(source, self._source)
        self._ledger = Ledger()
        self._kept = _Kept(settings.samples)
        self._seen = Seen(column_names(self._files, settings.source.format))
        self._examples: dict[str, list[dict[str, Any]]] = {}

    def write(self, out: Path, ledger: Path, rejects: Path) -> Ledger:
        """Read all rows and write the kept ones sorted by id, the ledger, and every rejected row.

        Raises GateError when too few rows could be used; then none of the three appears, and
        `<ledger>.failed.json` holds the counts and some of the rejected rows.
        """
        failed = ledger.with_name(f"{ledger.name}.failed.json")
        with atomic_write(rejects) as file:
            for reason, reject in self._rejects():
                self._ledger.skip(reason)
                _write_reject(file, reject)
                examples = self._examples.setdefault(reason, [])
                if len(examples) < _EXAMPLES:
                    examples.append(reject)
            self._ledger.kept = len(self._kept)
            self._check_gate(failed)
        write_jsonl(out, self._kept.in_order())
        write_json(ledger, self._ledger_document())
        failed.unlink(missing_ok=True)
        return self._ledger

    def _rejects(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Reads all rows; those not kept come out, each with its reason."""
        for number, (position, raw) in enumerate(
            rows(self._files, self._settings.source.format, self._columns()), start=1
        ):
            if number % _ROWS_BETWEEN_LINES == 0:
                logging.getLogger(__name__).info("%s: %d rows read", self._dataset, number)
            if isinstance(raw, RawError):
                reject = {"position": position, "row": raw.text, "error": raw.message}
                yield raw.reason, {"reason": raw.reason, **reject}
                continue
            self._seen.note(raw)
            try:
                row, notes = self._row(raw)
            except SkipRow as skip:
                yield skip.reason, {"reason": skip.reason, "position": position, "row": raw}
                continue
            for reason, row_id, place in self._kept.offer(row, position, notes):
                yield reason, {"reason": reason, "position": place, "id": row_id}

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
        try:
            conversation = self._layout.read(raw, settings.fields)
        except ConfigError as error:
            raise ConfigError(f"{config_line(['datasets', self._dataset, 'fields'])}: {error}") from error
        check_conversation(conversation.messages, native)
        question = next(made for made in conversation.messages if made["role"] == "user")
        notes = list(conversation.notes)
        if native:
            messages = until_last_answer(conversation.messages)
            if len(messages) < len(conversation.messages):
                notes.append("cut_after_last_answer")
        else:
            messages = asked(conversation.messages, with_system=settings.prompt == "system_and_first_user")
        row_id = prompt_id(question["content"])
        group = row_id if settings.group_by is None else _group(raw, settings.group_by)
        row = {"id": row_id, "dataset": self._dataset, "group": group, "messages": messages}
        if tools := _tools(conversation, messages):
            row["tools"] = tools
        return row, notes

    def _check_gate(self, failed: Path) -> None:
        files = ", ".join(str(path) for path in self._files)
        expected = f"in each row: {self._layout.EXPECTED}"
        try:
            check_kept_rows(
                self._dataset, f"{files}\n{self._seen}", self._ledger, self._settings.gates, expected
            )
        except GateError as error:
            document = {**self._ledger_document(), "examples": self._examples}
            write_json(failed, _jsonable(document))
            raise GateError(f"{error}\n  rows that were skipped, some of each kind: {failed}") from error

    def _ledger_document(self) -> dict[str, Any]:
        return {
            "dataset": self._dataset,
            "stage": "prompts",
            "source": {"files": self._source},
            **self._ledger.as_dict(),
            "notes": dict(sorted(self._kept.notes().items())),
            "licence": self._settings.licence,
            "layout": self._settings.layout,
            "native_model": self._settings.native_model,
        }


def check_conversation(messages: list[Message], native: bool) -> None:
    """Skip a conversation without a prompt, or a native one without an answer. Raises SkipRow."""
    if not messages:
        raise SkipRow("empty_conversation")
    spoken = [made for made in messages if made["role"] != "system"]
    if spoken and spoken[0]["role"] == "assistant":
        raise SkipRow("starts_with_assistant")
    questions = [made["content"].strip() for made in spoken if made["role"] == "user"]
    if not any(questions):
        raise SkipRow("no_user_turn")
    if not questions[0]:
        raise SkipRow("empty_prompt")
    if native and not any(made["role"] == "assistant" and made["content"].strip() for made in spoken):
        raise SkipRow("no_supervised_text")


def until_last_answer(messages: list[Message]) -> list[Message]:
    """The conversation without the turns that nobody answered."""
    last = max(place for place, made in enumerate(messages) if made["role"] == "assistant")
    return messages[: last + 1]


def asked(messages: list[Message], with_system: bool) -> list[Message]:
    """The first user turn, after the system turn before it where that is wanted and not blank."""
    place = next(place for place, made in enumerate(messages) if made["role"] == "user")
    systems = [made for made in messages[:place] if made["role"] == "system" and made["content"].strip()]
    kept = [*systems[:1], messages[place]] if with_system else [messages[place]]
    return [{"role": made["role"], "content": made["content"]} for made in kept]


def prompt_id(text: str) -> str:
    """A prompt's identity: its first user turn, white space aside. Answers and system texts play no part."""
    return content_key("prompt", " ".join(text.split()))


def _tools(conversation: Conversation, messages: list[Message]) -> list[dict[str, Any]] | None:
    has_system = any(made["role"] == "system" for made in messages)
    return None if conversation.system_declares_tools and has_system else conversation.tools


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


class _Kept:
    """The first row of each prompt and, where there is a cap, those of the lowest hashes."""

    def __init__(self, cap: int | None) -> None:
        self._cap = cap
        self._ids: set[bytes] = set()
        # The highest hash first, as it is the next to go; ids differ, so no comparison reaches the rest.
        self._heap: list[tuple[int, str, str, dict[str, Any], list[str]]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, row: dict[str, Any], position: str, notes: list[str]) -> Iterator[tuple[str, str, str]]:
        """Take a row; yields reason, id and position of one that goes, be it this or an earlier one."""
        row_id = row["id"]
        if bytes.fromhex(row_id) in self._ids:
            yield "duplicate_prompt", row_id, position
            return
        self._ids.add(bytes.fromhex(row_id))
        heapq.heappush(self._heap, (-int(content_key("sample", row_id), 16), row_id, position, row, notes))
        if self._cap is not None and len(self._heap) > self._cap:
            _, gone, place, _, _ = heapq.heappop(self._heap)
            yield "over_cap", gone, place

    def in_order(self) -> list[dict[str, Any]]:
        """The kept rows by id."""
        return sorted((row for _, _, _, row, _ in self._heap), key=lambda row: row["id"])

    def notes(self) -> Counter[str]:
        """How many kept rows were mended, by what was done."""
        return Counter(note for *_, notes in self._heap for note in notes)


def _write_reject(file: IO[bytes], reject: Mapping[str, Any]) -> None:
    line = json.dumps(_jsonable(reject), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    file.write(line.encode() + b"\n")


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
