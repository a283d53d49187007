"""Reasoning problems: parquet, `messages` with content before role, ten sources."""

from __future__ import annotations

import random

import pyarrow as pa

from .common import Filler, Row, Sample, Tally, compose, distinct, load_phrases, unique_fills

MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
SCHEMA = pa.schema([("messages", pa.list_(MESSAGE)), ("num_tokens", pa.int64()), ("source", pa.string())])

THOUGHTS = (
    "First I write down what is given and what is asked. Then I look for the rule that links the two.",
    "Let me try a small case before the real one, so that I see a mistake early.",
    "There are two ways to do this. The direct one is short enough, and I can check it with the other.",
)
ANSWERS = (
    "The steps above give the result, and putting it back into the question confirms it.",
    "In short: write down the rule, use the numbers that are given, and check the units.",
    "That settles the question. A quick estimate gives about the same value.",
)


def make_row(rng: random.Random, prompt: str, source: str) -> Row:
    """Return a row whose answer holds its thoughts in <think> tags."""
    answer = f"<think>\n{rng.choice(THOUGHTS)}\n</think>\n\n{rng.choice(ANSWERS)}"
    messages = [{"content": prompt, "role": "user"}, {"content": answer, "role": "assistant"}]
    return {"messages": messages, "num_tokens": rng.randint(900, 14000), "source": source}


def build(rng: random.Random) -> Sample:
    """Write the rows of mixture_of_thoughts.parquet."""
    fill = Filler(rng)
    tally = Tally()
    rows: list[Row] = []
    seen: set[str] = set()
    sections = load_phrases("mixture_of_thoughts")
    before, after = sections.pop("before"), sections.pop("after")
    for topic, phrases in sections.items():
        source = f"eyrie-{topic}" + ("-cots" if topic == "contest-code" else "")
        for prompt in unique_fills(fill, phrases, len(phrases) + 2, seen):
            rows.append(make_row(rng, compose(fill, before, prompt, after, share=0.9), source))
            tally.usable += 1
    distinct(row["messages"][0]["content"] for row in rows)
    rng.shuffle(rows)

    for number, tail in ((4, "\n"), (31, "  \n\n")):
        original = rows[number]
        rows.append(make_row(rng, original["messages"][0]["content"] + tail, original["source"]))
        tally.skipped["duplicate_prompt"] += 1
        tally.traps["duplicate_but_for_trailing_whitespace"] += 1
    rows[12:12] = [{"messages": [], "num_tokens": 0, "source": "eyrie-chance"}]
    tally.skipped["empty_conversation"] += 1
    tally.traps["empty_messages"] += 1
    backwards = make_row(rng, "Is that the only way to solve it?", "eyrie-field-algebra")
    backwards["messages"].reverse()
    rows[50:50] = [backwards]
    tally.skipped["starts_with_assistant"] += 1
    tally.traps["starts_with_assistant"] += 1
    return Sample("mixture_of_thoughts.parquet", rows, tally, SCHEMA)
