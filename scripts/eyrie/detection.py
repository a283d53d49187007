"""Which format a file has and which layout its rows: every layout tries to read a sample of them.

A layout is found when it gives more questions than any other. Two that read the same columns differ in how
well they know them: the order below decides. Two that read different columns and find different questions in
them are for a person to choose between.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyrie.layouts import load_layout
from eyrie.layouts.base import Conversation, Layout, SkipRow, list_column
from eyrie.questions import check_conversation
from eyrie.raw_bytes import PARQUET_MAGIC, first_bytes, open_bytes
from eyrie.raw_files import Format

Fields = dict[str, str]

_QUESTIONS = ("prompt", "question", "problem", "query", "input", "instruction", "request", "user", "human")
_ANSWERS = ("completion", "response", "solution", "answer", "output", "reply", "assistant")
_CHUNK = re.compile(r"(.*)_\d+")
_LISTS_BY_TWO_NAMES = ("messages", "harmony_messages", "mixed_turns")
# Lists of turns that are no conversation by themselves.
_PARTS = ("conversations", "rejected", "prompt", "completion")
# A layout's columns that hold no question, or none by itself.
_BESIDE = frozenset(
    {"system", "tools", "id", "role", "parent_id", "deleted", "loss_mask", "labels"}
    | {"output", "response", "thinking", "completion", "generated_message"}
)
_NO_ROW_OF_ITS_OWN = ("not_first_chunk", "not_a_root", "deleted")
# A rival reads nearly as many rows as the best layout, and its questions are others in more than a few rows.
_NEARLY = 0.9
_A_FEW = 0.02


@dataclass
class Reading:
    """What a layout made of the sample."""

    layout: str
    fields: Fields
    columns: frozenset[str]
    """The columns that the questions are in."""
    conversations: dict[int, Conversation] = field(default_factory=dict)
    """Usable conversations by the row's number."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why the other rows are not."""

    @property
    def understood(self) -> int:
        """Rows that give a question, or are known to be no row of their own."""
        others = sum(self.reasons[reason] for reason in _NO_ROW_OF_ITS_OWN)
        return len(self.conversations) + others if self.conversations else 0

    def question(self, number: int) -> str:
        """The first user turn of a row, white space aside; of token ids, those of the prompt."""
        conversation = self.conversations[number]
        if conversation.tokens is not None:
            return str(conversation.tokens.input_ids)
        turns = (made["content"] for made in conversation.messages if made["role"] == "user")
        return " ".join(next(turns).split())

    def __str__(self) -> str:
        columns = ", ".join(sorted(self.columns)) or "the row itself"
        fields = "".join(f", {name}: {column}" for name, column in self.fields.items())
        return f"{self.layout} (reads {columns}{fields})"


@dataclass(frozen=True)
class Detection:
    """The layout that was found, or those that a person must choose from."""

    found: Reading | None
    candidates: list[Reading]
    """All layouts that read some row or know why they don't, the best first."""


def detect_format(path: Path) -> Format:
    """A file's format, by its first bytes and, where they leave it open, its name. Raises RecordError."""
    start = first_bytes(path)
    name = path.name.removesuffix(".gz").removesuffix(".zst").lower()
    if start.startswith(PARQUET_MAGIC):
        return "parquet"
    if name.endswith(".csv"):
        return "csv"
    if start[:1] not in (b"[", b"{", b'"'):
        return "text" if name.endswith(".txt") else "jsonl"
    return "jsonl" if _begins_with_lines(path) else "json"


def _begins_with_lines(path: Path) -> bool:
    """Whether the first line is a whole value and another follows, or the name says that it is alone."""
    with open_bytes(path) as file:
        first, second = file.readline().removeprefix(b"\xef\xbb\xbf"), file.readline()
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return bool(second.strip()) or ".jsonl" in path.name


def detect_layout(rows: Sequence[Any]) -> Detection:
    """The layout of rows, all of one file. Nothing is found where two layouts find different questions."""
    columns: dict[str, None] = {}
    for row in rows:
        if isinstance(row, Mapping):
            columns.update(dict.fromkeys(row))
    tried = [
        _reading(layout, fields, rows, set(columns)) for layout, fields in _candidates(rows, list(columns))
    ]
    # The sort is stable: among equals the order of the candidates stays.
    readings = sorted(tried, key=lambda reading: -reading.understood)
    known = [reading for reading in readings if reading.conversations or _knows_why(reading)]
    best = readings[0] if readings and readings[0].conversations else None
    if best is not None and any(_disagrees(best, other) for other in readings[1:]):
        best = None
    return Detection(best, known)


def _knows_why(reading: Reading) -> bool:
    return any(not reason.startswith(("missing_column", "bad_type")) for reason in reading.reasons)


def _disagrees(best: Reading, other: Reading) -> bool:
    """Whether a layout reads nearly as many rows, from other columns, and finds other questions in them."""
    if other.understood < _NEARLY * best.understood or best.columns & other.columns:
        return False
    both = [number for number in best.conversations if number in other.conversations]
    different = sum(best.question(number) != other.question(number) for number in both)
    return different > _A_FEW * len(both) or not both


def _reading(name: str, fields: Fields, rows: Sequence[Any], columns: set[str]) -> Reading:
    layout = load_layout(name)
    reading = Reading(name, fields, _columns_read(layout, fields, columns))
    for number, row in enumerate(rows):
        try:
            conversation = layout.read(row, fields)
            if conversation.tokens is None:
                check_conversation(conversation.messages, native=False)
        except SkipRow as skip:
            reading.reasons[skip.reason] += 1
        else:
            reading.conversations[number] = conversation
    return reading


def _columns_read(layout: Layout, fields: Fields, columns: set[str]) -> frozenset[str]:
    """The columns with the questions; of two names for the list of turns, the one that is there."""
    names = [name for name in (*layout.COLUMNS, *layout.OPTIONAL) if name not in _BESIDE]
    present = [column for name in names if (column := fields.get(name, name)).split(".")[0] in columns]
    lists = [name for name in present if name in ("messages", "conversations")]
    return frozenset(lists[:1] if len(lists) == 2 else present)


def _candidates(rows: Sequence[Any], columns: list[str]) -> Iterator[tuple[str, Fields]]:
    """Layouts and fields worth trying, the better ones first, each once."""
    tried: list[tuple[str, Fields]] = []
    bare = any(isinstance(row, str | list) for row in rows)
    for name, fields in _all_candidates(rows, columns):
        if (name, fields) in tried:
            continue
        tried.append((name, fields))
        needed = [fields.get(column, column).split(".")[0] for column in load_layout(name).COLUMNS]
        either = name in _LISTS_BY_TWO_NAMES and not {"messages", "conversations"}.isdisjoint(columns)
        if bare or (either and not fields) or all(column in columns for column in needed):
            yield name, fields


def _all_candidates(rows: Sequence[Any], columns: list[str]) -> Iterator[tuple[str, Fields]]:
    yield "pretokenized", {}
    yield "preference", {}
    yield "preference", {"chosen": "chosen_messages", "rejected": "rejected_messages"}
    yield "preference", {"chosen": "response_j", "rejected": "response_k", "prompt": "question"}
    yield "request_log", {}
    yield "request_log", {"request": "body"}
    if "generated_message" in columns:
        yield "generated_message", {}
    for column in _columns_of_turns(rows):
        yield "messages", {} if column == "messages" else {"messages": column}
    yield "messages", {}
    yield "harmony_messages", {}
    yield ("sharegpt_chunks" if _is_chunked(rows) else "sharegpt"), {}
    yield "mixed_turns", {}
    yield "trajectory", {}
    yield "chat_string", {}
    yield "alpaca", {}
    yield from _with_reasoning(columns)
    if "history" in columns:
        yield "history_pairs", {}
    if {"role", "text"} <= set(columns):
        yield "message_rows", {}
        yield "message_rows", {"parent_id": "parent_message_id"}
    yield from _pairs(columns)
    yield "prompt_messages", {}
    yield "message_tree", {}
    yield "string_list", {}
    yield "user_turns", {}
    yield "user_turns", {"turns": "prompt"}
    yield "turn_pairs", {}
    for text in ("text", *(column for column in columns if column in ("chat", "prompt", "chosen"))):
        for name in ("chatml_text", "harmony_text", "inst_text", "instruction_text", "dialogue_text"):
            yield name, {} if text == "text" else {"text": text}


def _columns_of_turns(rows: Sequence[Any]) -> list[str]:
    """Columns, and paths into them, that hold a list of {role, content} in some row."""
    found: dict[str, None] = {}
    for row in rows:
        for column, value in row.items() if isinstance(row, Mapping) else ():
            inner = value.items() if isinstance(value, Mapping) and column not in ("request", "body") else ()
            for path in (column, *(f"{column}.{key}" for key, _ in inner)):
                if path not in found and path not in _PARTS and _has_turns(row, path):
                    found[path] = None
    return sorted(found, key=lambda path: path != "messages")


def _has_turns(row: Mapping[str, Any], path: str) -> bool:
    try:
        turns = list_column(row, path)
    except SkipRow:
        return False
    return bool(turns) and isinstance(turns[0], Mapping) and {"role", "content"} <= turns[0].keys()


def _is_chunked(rows: Sequence[Any]) -> bool:
    """Whether the ids count the chunks of several conversations; one prefix for all is just a number."""
    ids = [row.get("id") for row in rows if isinstance(row, Mapping)]
    found = [_CHUNK.fullmatch(row_id) for row_id in ids if isinstance(row_id, str)]
    prefixes = {match[1] for match in found if match is not None}
    return len(found) == len(rows) and None not in found and 3 * len(prefixes) >= len(rows) > 0


def _with_reasoning(columns: list[str]) -> Iterator[tuple[str, Fields]]:
    """A question, a reasoning and an answer, each in its column."""
    thinking = [
        name
        for name in ("thinking", "reasoning", "reasoning_content", "deepseek_reasoning")
        if name in columns
    ]
    questions = [name for name in _QUESTIONS if name in columns]
    answers = [name for name in (*_ANSWERS, "deepseek_solution") if name in columns]
    for question in questions if thinking and answers else ():
        named = {"problem": question, "thinking": thinking[0], "response": answers[0]}
        yield "reasoning_pairs", {name: column for name, column in named.items() if name != column}


def _pairs(columns: list[str]) -> Iterator[tuple[str, Fields]]:
    answers = [name for name in _ANSWERS if name in columns]
    for question in _QUESTIONS:
        if question in columns:
            yield "pairs", {"prompt": question} | ({"response": answers[0]} if len(answers) == 1 else {})
