"""Reasoning answers in marked sections: parquet, `from` is user or assistant, a system column beside it."""

from __future__ import annotations

import random

import pyarrow as pa

from .common import Filler, Row, Sample, Tally, compose, distinct, load_phrases, unique_fills

TURN = pa.struct([("from", pa.string()), ("value", pa.string())])
SCHEMA = pa.schema([("system", pa.string()), ("conversations", pa.list_(TURN))])

SYSTEM = (
    "Before you answer, reason at length and in order: analyse the question, collect what is known, try an "
    "approach, test it, and correct yourself where needed. Put all of that between <|begin_of_thought|> and "
    "<|end_of_thought|>. Then give the finished answer, clear and complete, between <|begin_of_solution|> "
    "and <|end_of_solution|>."
)
BOXED = "Give your final result inside \\boxed{}. "
THOUGHTS = (
    "Let me restate the question. The given numbers should be enough, so I set up one relation.",
    "A quick guess first, then a real argument. The guess is of the right size.",
    "Wait, I should check the border case. It holds there as well.",
)
SOLUTIONS = (
    "The relation has one solution, which the check confirms: $\\boxed{x}$.",
    "Step by step: name the unknown, write the condition, solve it, test it.",
    "The argument leaves only one possibility, and that one works.",
)


def make_row(rng: random.Random, prompt: str) -> Row:
    """Return a row of one question and one answer in marked sections."""
    thought = " ".join(rng.sample(THOUGHTS, 2))
    answer = (
        f"<|begin_of_thought|>\n\n{thought}\n\n<|end_of_thought|>\n\n"
        f"<|begin_of_solution|>\n\n{rng.choice(SOLUTIONS)}\n\n<|end_of_solution|>"
    )
    turns = [{"from": "user", "value": prompt}, {"from": "assistant", "value": answer}]
    return {"system": SYSTEM, "conversations": turns}


def build(rng: random.Random) -> Sample:
    """Write the rows of openthoughts.parquet."""
    fill = Filler(rng)
    tally = Tally()
    rows: list[Row] = []
    seen: set[str] = set()
    sections = load_phrases("openthoughts")
    before, after = sections.pop("before"), sections.pop("after")
    for topic, phrases in sections.items():
        for number, prompt in enumerate(unique_fills(fill, phrases, len(phrases) * 4 // 3, seen)):
            prompt = compose(fill, before, prompt, after, share=0.85)
            boxed = topic == "math" and number % 3 == 0
            rows.append(make_row(rng, BOXED + prompt if boxed else prompt))
            tally.usable += 1
            tally.traps["boxed_instruction"] += boxed
    distinct(row["conversations"][0]["value"] for row in rows)
    rng.shuffle(rows)
    tally.traps["openai_names_under_from"] += len(rows)
    for place in (17, 60):
        rows[place:place] = [{"system": SYSTEM, "conversations": []}]
        tally.skipped["empty_conversation"] += 1
        tally.traps["empty_conversations"] += 1
    tally.traps["thought_format_in_system"] += len(rows)
    return Sample("openthoughts.parquet", rows, tally, SCHEMA)
