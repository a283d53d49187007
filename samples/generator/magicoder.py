"""Coding problems seeded by code fragments: JSONL, ten languages."""

from __future__ import annotations

import random

from .common import (
    ONLY_TURN_BLANK,
    Filler,
    Row,
    Sample,
    Tally,
    compose,
    cycle,
    distinct,
    load_phrases,
    make_id,
    unique_fills,
)

SEEDS = {
    "python": ("    for row in reader:\n        total += int(row[2])\n", "def main():\n    args = parse()\n"),
    "javascript": ("export const noop = () => {};\n", "items.map((item) => item.id).join(',')\n"),
    "typescript": ("type Id = string | number;\n", "export interface Props {\n  open: boolean;\n"),
    "java": ("public int size() {\n    return size;\n}\n", "private final List<String> names;\n"),
    "cpp": ("#include <vector>\n\nint main() {\n", "    ++count[word];\n  }\n"),
    "rust": ("impl Default for Config {\n", "    let mut line = String::new();\n"),
    "go": ("func (s *Store) Len() int {\n", 'package main\n\nimport "fmt"\n'),
    "csharp": ("public sealed class Node\n{\n", "using System.Linq;\n"),
    "shell": ("set -euo pipefail\n", 'if [ -z "$1" ]; then\n  exit 1\n'),
    "sql": ("CREATE INDEX by_date ON visits (day);\n", "LEFT JOIN towns t ON t.id = v.town_id\n"),
}
LANGUAGES = {
    "javascript": "JavaScript",
    "typescript": "TypeScript",
    "cpp": "C++",
    "csharp": "C#",
    "shell": "bash",
    "sql": "SQL",
}
QUESTIONS = (
    "Explain what this piece of {language} does and where one would find it.",
    "Here is a fragment of {language} from an old project. Complete it in a sensible way.",
    "I do not know {language} well. Go through the following lines one by one.",
    "Which mistakes are easy to make around this {language} code? Name two.",
    "Turn the following {language} fragment into a small complete example.",
    "Suggest better names and a comment for this {language} code.",
)
EXTRA = (
    "Comment the important lines.",
    "Keep it under thirty lines.",
    "It should read well for a beginner.",
    "Use no other libraries, please.",
    "Then say in two sentences how it works.",
)


def make_row(rng: random.Random, lang: str, index: int, problem: str | None) -> Row:
    """Return a row; `seed` is a fragment of code."""
    fragment = rng.choice(SEEDS[lang])
    return {
        "lang": lang,
        "raw_index": rng.randint(1000, 160000),
        "index": index,
        "seed": fragment,
        "openai_fingerprint": "fp_" + make_id(rng, 8),
        "problem": problem,
        "solution": f"One way to write it:\n\n```{lang}\n{fragment}```\n\nThe rest follows the same pattern.",
    }


def build(rng: random.Random) -> Sample:
    """Write the rows of magicoder.jsonl."""
    fill = Filler(rng)
    tally = Tally()
    drafts: list[tuple[str, str]] = []
    seen: set[str] = set()
    sections = load_phrases("magicoder")
    before = sections.pop("before")
    general = iter(cycle(rng, sections.pop("any"), 2 * len(sections)))
    for lang, phrases in sections.items():
        for problem in unique_fills(fill, phrases, len(phrases), seen):
            drafts.append((lang, compose(fill, before, problem, () if "\n" in problem else EXTRA, share=0.9)))
        for fragment, question in zip(SEEDS[lang], rng.sample(QUESTIONS, 2), strict=True):
            text = question.format(language=LANGUAGES.get(lang, lang.capitalize()))
            text = compose(fill, before, text, (), share=0.9)
            drafts.append((lang, f"{text}\n\n```{lang}\n{fragment}```"))
        for _ in range(2):
            text = fill(next(general), language=LANGUAGES.get(lang, lang.capitalize()))
            drafts.append((lang, compose(fill, before, text, (), share=0.9)))
            seen.add(text)
    distinct(problem for _, problem in drafts)
    rng.shuffle(drafts)

    rows = []
    for number, (lang, problem) in enumerate(drafts):
        # Every tenth index is that of the row before: the column is no identity.
        repeats = number % 10 == 9
        rows.append(make_row(rng, lang, number - 1 if repeats else number, problem))
        tally.usable += 1
        tally.traps["duplicated_index"] += repeats
    rows[33:33] = [make_row(rng, "python", 9000, None)]
    tally.skipped[ONLY_TURN_BLANK] += 1
    tally.traps["null_problem"] += 1
    tally.traps["seed_is_code"] += len(rows)
    return Sample("magicoder.jsonl", rows, tally)
