"""General multi-turn chats: parquet, `prompt` repeats the first message."""

from __future__ import annotations

import random

import pyarrow as pa

from .common import Filler, Row, Sample, Tally, compose, distinct, load_phrases, make_id, unique_fills

MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
SCHEMA = pa.schema([("prompt", pa.string()), ("prompt_id", pa.string()), ("messages", pa.list_(MESSAGE))])
LINE_SEPARATOR = "\u2028"
NEXT_LINE = "\u0085"

REPLIES = (
    "Of course. Here is a first version that you can adapt: start with the reason, go on with the details, "
    "and close with a kind word.",
    "Happy to help. Begin small, keep the important dates in view, and ask somebody to read it once more.",
    "Here are my thoughts. The first point matters most, the others can wait until next week.",
    "That is a good question. In short, it depends on the season, the people and how much time you have.",
)


def chat(turns: list[str], closing: str | None) -> list[Row]:
    """Return user turns, each followed by a reply, except that without `closing` the last has none."""
    messages: list[Row] = []
    for number, text in enumerate(turns):
        messages.append({"content": text, "role": "user"})
        if number < len(turns) - 1:
            messages.append(
                {"content": REPLIES[(len(turns[0]) + number) % len(REPLIES)], "role": "assistant"}
            )
    if closing is not None:
        messages.append({"content": closing, "role": "assistant"})
    return messages


def build(rng: random.Random) -> Sample:
    """Write the rows of ultrachat.parquet."""
    fill = Filler(rng)
    sections = load_phrases("ultrachat")
    follow, before, after = (sections.pop(key) for key in ("follow", "before", "after"))
    tally = Tally()
    rows: list[Row] = []
    seen: set[str] = set()
    prompts: list[str] = []
    for phrases in sections.values():
        prompts += [
            compose(fill, before, text, after, share=0.9) for text in unique_fills(fill, phrases, 19, seen)
        ]
    rng.shuffle(prompts)
    for number, prompt in enumerate(prompts):
        closing: str | None = rng.choice(REPLIES)
        if number % 15 == 4:
            prompt = prompt.replace(". ", f".{LINE_SEPARATOR}", 1) + LINE_SEPARATOR + "Thank you!"
            tally.traps["line_separator_in_user_turn"] += 1
        elif number % 15 == 9:
            prompt += NEXT_LINE + "Many thanks in advance."
            tally.traps["next_line_in_user_turn"] += 1
        elif number % 15 == 12:
            closing = f"Two things:{LINE_SEPARATOR}plan ahead,{NEXT_LINE}and stay calm."
            tally.traps["separators_in_answer"] += 1
        turns = [prompt] + [fill(phrase) for phrase in rng.sample(follow, rng.randint(0, 2))]
        if number % 12 == 7:
            turns = turns if len(turns) > 1 else [prompt, fill(follow[0])]
            closing = None
            tally.traps["ends_with_user"] += 1
        tally.traps["several_turns"] += len(turns) > 1
        rows.append({"prompt": prompt, "prompt_id": make_id(rng, 64), "messages": chat(turns, closing)})
        tally.usable += 1
    distinct(prompts)

    silent = chat(["", fill(follow[3])], "Gladly, but please tell me first what it is about.")
    rows[70:70] = [{"prompt": "", "prompt_id": make_id(rng, 64), "messages": silent}]
    tally.skipped["empty_prompt"] += 1
    tally.traps["empty_user_content"] += 1
    tally.traps["several_turns"] += 1
    return Sample("ultrachat.parquet", rows, tally, SCHEMA)
