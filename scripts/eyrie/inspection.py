"""What a stranger's file holds, in words and figures, and the configuration entry that reads it."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from eyrie.config import NAMED_TARGETS, GateSettings
from eyrie.detection import Detection, Reading, detect_layout
from eyrie.errors import BuildError
from eyrie.media import without_media
from eyrie.raw_files import Format, RawError, Seen, rows

_SHOWN_ROWS = 3
_SHOWN_CHARACTERS = 48
_SHOWN_ITEMS = 3


class InspectionError(BuildError):
    """No layout reads the file, or more than one and differently; the message lists them."""


class Inspection:
    """The first rows of a file, what they look like, and which layout reads them."""

    def __init__(self, path: Path, file_format: Format, limit: int) -> None:
        """limit: rows looked at. Raises RecordError for a file that is not what it should be."""
        self._path = path
        self._format = file_format
        sample = [value for _, value in islice(rows([path], file_format), limit)]
        self._errors = Counter(value.reason for value in sample if isinstance(value, RawError))
        self._rows = [value for value in sample if not isinstance(value, RawError)]
        self._all = len(sample) < limit
        self._detection = detect_layout(self._rows)
        self._text_only = False
        if self._detection.found is None and self._only_media():
            self._text_only = True
            self._detection = detect_layout([without_media(row)[0] for row in self._rows])

    def _only_media(self) -> bool:
        return not any(reading.conversations for reading in self._detection.candidates) and any(
            "multimodal" in reading.reasons for reading in self._detection.candidates
        )

    def report(self) -> str:
        """Columns, roles, figures and rows, whatever the layout."""
        number = len(self._rows) + self._errors.total()
        which = f"all {number} rows" if self._all else f"the first {number} rows"
        lines = [f"{self._path}: {self._format}, {which}"]
        lines += [f"  cannot be read: {count} {reason}" for reason, count in sorted(self._errors.items())]
        lines += ["columns (filled, kinds, least - median - most characters or items):", *self._columns()]
        seen = Seen([])
        for row in self._rows:
            seen.note(row)
        lines += [seen.roles(), *self._speakers(), "rows, shortened:"]
        lines += [f"  {_schematic(row)}" for row in self._rows[:_SHOWN_ROWS]]
        return "\n".join(lines)

    def entry(self) -> str:
        """The layout that was found and the configuration entry. Raises InspectionError."""
        found = self._detection.found
        if found is None:
            raise InspectionError(self._why_none())
        count = len(found.conversations)
        share = f"{count} of {len(self._rows)} rows ({count / len(self._rows):.0%}) give a question"
        skipped = _counts(found.reasons)
        distinct = len({found.question(number) for number in found.conversations})
        lines = [
            f"layout found: {found}",
            f"  how sure: {share}{'; skipped: ' + skipped if skipped else ''}",
            f"  distinct questions: {distinct}",
            *self._others(self._detection, found),
            "",
            "entry for the configuration:",
            "",
            self._entry(found, distinct),
        ]
        return "\n".join(lines)

    def _columns(self) -> Iterator[str]:
        columns: dict[str, list[Any]] = {}
        for row in self._rows:
            for name, value in row.items() if isinstance(row, Mapping) else [("(the row itself)", row)]:
                columns.setdefault(name, []).append(value)
        width = max((len(name) for name in columns), default=0)
        for name, values in columns.items():
            filled = [value for value in values if not _is_blank(value)]
            kinds = Counter(_kind(value) for value in values if value is not None)
            lengths = sorted(len(value) for value in filled if isinstance(value, str | list))
            sizes = f"{lengths[0]} - {median(lengths):.0f} - {lengths[-1]}" if lengths else ""
            share = f"{len(filled)}/{len(self._rows)}"
            yield f"  {name:{width}}  {share:>9}  {_counts(kinds, alone=False):24}  {sizes}".rstrip()

    def _speakers(self) -> Iterator[str]:
        found = self._detection.found or next(iter(self._detection.candidates), None)
        if found is None:
            return
        spoken = [made.messages for made in found.conversations.values() if made.messages]
        if not spoken:
            return
        turns = sorted(len(messages) for messages in spoken)
        for which, place in (("first", 0), ("last", -1)):
            roles = Counter(messages[place]["role"] for messages in spoken)
            yield f"  {which} role as {found.layout} reads it: {_counts(roles)}"
        yield f"  turns: {turns[0]} - {median(turns):.0f} - {turns[-1]}"

    def _others(self, detection: Detection, found: Reading) -> Iterator[str]:
        others = [other for other in detection.candidates if other is not found and other.conversations]
        same = [other for other in others if other.columns & found.columns or not other.columns]
        if same:
            names = ", ".join(f"{other.layout} ({len(other.conversations)} rows)" for other in same)
            yield f"  also fit for these columns, but knowing less of them: {names}"
        for other in others:
            if other not in same:
                yield f"  also readable, {len(other.conversations)} rows, no other questions: {other}"

    def _why_none(self) -> str:
        readable = [other for other in self._detection.candidates if other.conversations]
        if readable:
            lines = [f"{self._path}: more than one layout fits, and they find different questions:"]
            for other in readable:
                questions = [f"{other.question(number):.60}" for number in islice(other.conversations, 2)]
                lines.append(f"  {other}, {len(other.conversations)} rows, such as {' | '.join(questions)}")
            lines.append(
                "  change: write the entry with the one that is meant (`layout`, and `fields` if named)"
            )
            return "\n".join(lines)
        lines = [f"{self._path}: no layout reads its rows"]
        lines += [f"  {other}: skipped {_counts(other.reasons)}" for other in self._detection.candidates]
        lines.append(
            "  expected: one of the shapes that the modules in scripts/eyrie/layouts describe\n"
            "  change: bring the file into one of them, or write a layout (docs/architecture.md)"
        )
        return "\n".join(lines)

    def _entry(self, found: Reading, distinct: int) -> str:
        made: dict[str, Any] = {
            "source": {"files": [glob.escape(str(self._path))], "format": self._format},
            "licence": "unknown",
            "layout": found.layout,
        }
        if found.fields:
            made["fields"] = found.fields
        native = any(conversation.tokens is not None for conversation in found.conversations.values())
        made["kind"] = "native" if native else "prompts"
        if native:
            made["native_model"] = "unknown"
        if self._text_only:
            made["media"] = "text_only"
        gates = self._gates(found, distinct)
        if gates:
            made["gates"] = gates
        text = yaml.safe_dump(
            {"datasets": {_dataset_name(self._path): made}}, sort_keys=False, allow_unicode=True, width=1_000
        )
        return text + "".join(f"# {line}\n" for line in self._advice(found, native))

    def _gates(self, found: Reading, distinct: int) -> dict[str, float]:
        """Gates that the sample would not pass as they are, with room below what was seen."""
        kept = len(found.conversations)
        judged = distinct + len(self._rows) - kept + self._errors.total()
        gates: dict[str, float] = {}
        if distinct / judged < GateSettings().min_kept_share * 1.2:
            gates["min_kept_share"] = round(distinct / judged / 2, 4)
        if 1 - distinct / kept > GateSettings().max_duplicate_share:
            gates["max_duplicate_share"] = 1.0
        return gates

    def _advice(self, found: Reading, native: bool) -> Iterator[str]:
        yield "licence: state the source's own; it goes into every manifest"
        if native:
            yield "native_model: the model that wrote the answers, which must be the target"
            return
        spoken = [made.messages for made in found.conversations.values()]
        if any(any(made["role"] == "assistant" for made in messages) for messages in spoken):
            yield "kind: prompts asks the target anew; native, with native_model, keeps the row's answers"
        systems = {messages[0]["content"] for messages in spoken if messages[0]["role"] == "system"}
        if len(systems) > 1:
            yield f"prompt: system_and_first_user asks with the system turns; there are {len(systems)}"
        if self._text_only:
            yield "media: every row holds pictures or sounds; text_only asks about them without showing them"


def _dataset_name(path: Path) -> str:
    name = re.sub(r"[^a-z0-9]+", "_", path.name.split(".")[0].lower()).strip("_")
    return name if name[:1].isalpha() and name not in NAMED_TARGETS else f"d_{name}"


def _is_blank(value: Any) -> bool:
    return value is None or value == [] or value == {} or (isinstance(value, str) and not value.strip())


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "object"
    return {"str": "text", "NoneType": "null"}.get(type(value).__name__, type(value).__name__)


def _counts(counter: Counter[str], alone: bool = True) -> str:
    if len(counter) == 1 and not alone:
        return next(iter(counter))
    return ", ".join(f"{name} {count}" for name, count in counter.most_common(8))


def _schematic(row: Any) -> str:
    return json.dumps(_shortened(row), ensure_ascii=False, default=str)


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}... ({len(value)})"
    if isinstance(value, Mapping):
        return {key: _shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        shown = [_shortened(inner) for inner in value[:_SHOWN_ITEMS]]
        left = len(value) - len(shown)
        return [*shown, f"... {left} more"] if left else shown
    return value
