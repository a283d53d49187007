"""What the dataset modules share: phrase files, slot filling, bookkeeping and file writers."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PHRASES = Path(__file__).with_name("phrases")

# A row with one single user turn, and that one blank, has no user turn with text.
ONLY_TURN_BLANK = "no_user_turn"

_SLOT = re.compile(r"\{(?:([a-z_]+)(?:#(\d))?|([a-z]):(\d+)-(\d+)|(\d+)-(\d+))\}")

# Lists whose entries belong together: a phrase that names one of a kind and the kind means the same kind.
_PARALLEL = {"record": "records", "records": "record"}

Row = dict[str, Any]


def normalised(text: str) -> str:
    """Return the text as duplicates are judged: stripped, runs of whitespace made one space."""
    return " ".join(text.split())


def load_words() -> dict[str, list[str]]:
    """Read the word lists, `key: entry, entry, ...` a line."""
    words: dict[str, list[str]] = {}
    for line in (PHRASES / "words.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            key, _, entries = line.partition(": ")
            words[key] = [entry.strip() for entry in entries.split(",")]
    return words


def load_phrases(name: str) -> dict[str, list[str]]:
    """Read `phrases/<name>.txt`: `== section` headings, phrases separated by blank lines.

    The lines of a phrase are joined by spaces, except that a line starting with `|` keeps its own line,
    which is how code stands in a phrase.
    """
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for block in re.split(r"\n\s*\n", (PHRASES / f"{name}.txt").read_text(encoding="utf-8").strip()):
        lines = block.strip("\n").split("\n")
        if lines[0].startswith("== "):
            current = sections.setdefault(lines.pop(0)[3:].strip(), [])
        text = ""
        after_code = False
        for line in lines:
            is_code = line.startswith("|")
            joint = "" if not text else "\n" if is_code or after_code else " "
            text += joint + (line[1:] if is_code else line.strip())
            after_code = is_code
        if text:
            current.append(text)
    return sections


# How many prompts of a file share a phrase. In a real dataset of a hundred thousand rows every question has
# many relatives; in one of a hundred rows it has them only if there are few kinds of question.
RELATIVES = 4


class Filler:
    """Fills the slots of a phrase.

    `{name}` takes an entry of that word list and keeps it for the phrase, `{name#2}` a different entry,
    `{3-40}` a number, `{a:3-40}` a number that `{a}` repeats. `last` holds what the latest call chose, so
    that a related phrase can be filled alike.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.words = load_words()
        self.last: dict[str, str] = {}

    def __call__(self, phrase: str, **given: str) -> str:
        """Return the phrase with its slots filled; `given` fixes some of them."""
        chosen: dict[str, str] = dict(given)
        self.last = chosen

        def replace(match: re.Match[str]) -> str:
            word, ordinal, key, low, high, plain_low, plain_high = match.groups()
            if plain_low:
                return str(self.rng.randint(int(plain_low), int(plain_high)))
            if key:
                chosen[key] = str(self.rng.randint(int(low), int(high)))
                return chosen[key]
            slot = f"{word}#{ordinal}" if ordinal else word
            if slot not in chosen:
                taken = {value for other, value in chosen.items() if other.split("#")[0] == word}
                chosen[slot] = self.rng.choice([entry for entry in self.words[word] if entry not in taken])
                if word in _PARALLEL:
                    other = _PARALLEL[word]
                    chosen[other] = self.words[other][self.words[word].index(chosen[slot])]
            return chosen[slot]

        filled = _SLOT.sub(lambda match: _article(match, replace(match)), phrase)
        return filled.replace(" \0", "n ")


def _article(match: re.Match[str], value: str) -> str:
    """Turn "a" before a filled slot into "an" where the value wants it."""
    before = match.string[: match.start()]
    if re.search(r"(^|\s)[Aa] $", before) and value[0].lower() in "aeiou":
        return "\0" + value
    return value


def cycle(rng: random.Random, items: Sequence[str], count: int) -> list[str]:
    """Return `count` items in random order, each used about equally often."""
    drawn: list[str] = []
    if not items and count:
        raise ValueError("nothing to draw from")
    while len(drawn) < count:
        round_ = list(items)
        rng.shuffle(round_)
        drawn += round_
    return drawn[:count]


@dataclass
class Tally:
    """What was planted in one dataset, counted while it is planted."""

    usable: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    traps: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> Row:
        """Return the entry of expected.json."""
        rows = self.usable + sum(self.skipped.values())
        return {
            "rows": rows,
            "usable": self.usable,
            "skipped": dict(sorted(self.skipped.items())),
            "traps": dict(sorted(self.traps.items())),
        }


@dataclass
class Sample:
    """One dataset's rows, the file they go to, its parquet schema if it has one, and the planted counts."""

    file: str
    rows: list[Row]
    tally: Tally
    schema: pa.Schema | None = None

    def write(self, folder: Path) -> Path:
        """Write the rows in the format that the file's name asks for."""
        path = folder / self.file
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(self.rows, schema=self.schema), path, compression="zstd")
        elif path.suffix == ".jsonl":
            write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows))
        else:
            write_text(
                path, "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in self.rows) + "\n]\n"
            )
        return path


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with plain newlines on every system."""
    path.write_bytes(text.encode("utf-8"))


def distinct(prompts: Iterable[str]) -> None:
    """Fail when two prompts are equal, so that no duplicate gets in that was not planted."""
    repeated = [text for text, times in Counter(map(normalised, prompts)).items() if times > 1]
    if repeated:
        raise ValueError(f"{len(repeated)} prompts came out twice, the first: {repeated[0]!r}")


def make_id(rng: random.Random, length: int = 12) -> str:
    """Return a hexadecimal id drawn from the generator's own random numbers."""
    return "".join(rng.choice("0123456789abcdef") for _ in range(length))


def unique_fills(
    fill: Filler, phrases: Sequence[str], count: int, seen: set[str], relatives: int = RELATIVES
) -> list[str]:
    """Fill phrases in random order until there are `count` results, each of them new; `seen` is extended.

    Up to `relatives` results share a phrase, as questions of one kind do in a large dataset; the seed draws
    which phrases these are. Once all phrases are used, their turn comes again. Raises ValueError where they
    do not give so many different results.
    """
    results: list[str] = []
    while len(results) < count:
        before = len(results)
        for phrase in fill.rng.sample(phrases, len(phrases)):
            for _ in range(min(relatives, count - len(results))):
                text = _new_fill(fill, phrase, seen)
                if text is None:
                    break
                seen.add(normalised(text))
                results.append(text)
        if len(results) == before:
            raise ValueError(f"the phrases give {before} different results, {count} are needed: {phrases}")
    return results


def _new_fill(fill: Filler, phrase: str, seen: set[str]) -> str | None:
    """The phrase filled in a way that was not seen; None where some tries found no such way."""
    for _ in range(50 if _SLOT.search(phrase) else 1):
        text = fill(phrase)
        if normalised(text) not in seen:
            return text
    return None


def compose(
    fill: Filler, before: Sequence[str], text: str, after: Sequence[str], share: float = 0.6, joint: str = " "
) -> str:
    """Put a sentence before the text, one after it, or both; each happens in `share` of the cases."""
    parts = [text]
    if before and fill.rng.random() < share:
        parts.insert(0, fill(fill.rng.choice(before)))
    if after and fill.rng.random() < share:
        parts.append(fill(fill.rng.choice(after)))
    return joint.join(parts)
