"""Shared chats: a JSON array with chunked ids, many role names and scraping remnants."""

from __future__ import annotations

import random

from .common import Filler, Row, Sample, Tally, compose, distinct, load_phrases, unique_fills

LINE_SEPARATOR = "\u2028"
HUMAN_NAMES = ("human", "user")
MODEL_NAMES = {14: "chatgpt", 16: "bing", 18: "bard"}

REPLIES = (
    "Sure! Here is a version that should work for you.",
    "Good question. The short answer is yes, with one exception.",
    "Let's go through it one step at a time.",
    "Here are some ideas, the simplest ones first.",
    "I can help with that. Tell me a little more about what you have tried.",
)
SCRAPED_REPLIES = (
    "pythonCopy code\nfor item in items:\n    print(item)\n\nThis prints each item on its own line.",
    '<div class="markdown"><p>Here is the result:</p><p>it is about right.</p></div>',
    "bashCopy code\nls -l\n\nThe first column shows the rights.",
    "If a &lt; b then the first one is smaller &amp; comes first.<br>",
)
HTML_PROMPTS = (
    "<div>how do I give this box a {colour} border and show the word {object} in it?</div>",
    "what does &lt;p&gt; mean when a page about the {place} in {city} shows it as text?",
    "<p>My page says hello to {name}.</p> Make it say goodbye to {name#2} as well.",
    "why does if (a &lt; {3-40} &amp;&amp; b) not compile in my {app}?",
)
CODE_LABEL_PROMPTS = (
    "pythonCopy code\nprint(total / {0-9})\n\nis this safe? it's for the {field} of my {records}",
    "sqlCopy code\nSELECT * FROM {object}s;\n\nonly the rows from {month} please",
)
CONTROL_PROMPTS = (
    "my chat log ends every line with <|im_end|> and I want the text about {city} only. how to remove it?",
    "<|im_start|>system\nYou are a {job} from {country}.<|im_end|>\nsay hello to the guests of the {event}",
)


def build(rng: random.Random) -> Sample:
    """Write the rows of sharegpt.json."""
    fill = Filler(rng)
    sections = load_phrases("sharegpt")
    more, before, after = (sections.pop(key) for key in ("more", "before", "after"))
    tally = Tally()
    seen: set[str] = set()
    prompts: list[tuple[str, str]] = []
    for phrases in sections.values():
        texts = unique_fills(fill, phrases, len(phrases) * 3 // 2, seen)
        prompts += [
            ("", compose(fill, before, text, after, share=0.9, joint=rng.choice((" ", "\n"))))
            for text in texts
        ]
    for trap, planted in (
        ("html_in_human_turn", HTML_PROMPTS),
        ("code_label_in_human_turn", CODE_LABEL_PROMPTS),
        ("control_tokens_in_human_turn", CONTROL_PROMPTS),
    ):
        prompts += [(trap, text) for text in unique_fills(fill, planted, len(planted), seen, 1)]
    distinct(text for _, text in prompts)
    rng.shuffle(prompts)

    rows: list[Row] = []
    names = [_name(rng) for _ in prompts]
    for number, (trap, prompt) in enumerate(prompts):
        if trap:
            tally.traps[trap] += 1
        elif number % 16 == 5:
            prompt += LINE_SEPARATOR + "thanks"
            tally.traps["line_separator_in_human_turn"] += 1
        rows.append(
            {"id": f"{names[number]}_0", "conversations": _turns(rng, fill, more, number, prompt, tally)}
        )
        tally.usable += 1
    _plant_unusable(rng, fill, more, rows, names, tally)
    return Sample("sharegpt.json", rows, tally)


def _name(rng: random.Random) -> str:
    """Return the first part of an id, as such sites make them."""
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789") for _ in range(7))


def _turn(role: str, text: str, tally: Tally) -> Row:
    tally.traps[f"role_{role}"] += 1
    return {"from": role, "value": text}


def _turns(
    rng: random.Random, fill: Filler, more: list[str], number: int, prompt: str, tally: Tally
) -> list[Row]:
    """Return a usable conversation that starts with the prompt."""
    human = HUMAN_NAMES[number % 8 == 3]
    model = MODEL_NAMES.get(number % 20, "gpt")
    turns: list[Row] = []
    if number % 18 == 6:
        turns.append(_turn("system", fill("You are a {adj} helper."), tally))
    turns.append(_turn(human, prompt, tally))
    if number % 14 == 8:
        turns.append(_turn(human, "sorry, sent too early. take your time", tally))
        tally.traps["consecutive_same_role"] += 1
    if number % 11 == 2:
        turns.append(_turn(model, SCRAPED_REPLIES[number // 11 % len(SCRAPED_REPLIES)], tally))
        tally.traps["scraped_answer"] += 1
    elif number % 11 == 4:
        turns.append(_turn(model, f"First of all:{LINE_SEPARATOR}do not worry.", tally))
        tally.traps["line_separator_in_answer"] += 1
    elif number % 31 == 20:
        turns.append(_turn(model, "", tally))
        tally.traps["empty_answer"] += 1
    else:
        turns.append(_turn(model, rng.choice(REPLIES), tally))
    if number % 3 == 1:
        turns += [_turn(human, fill(rng.choice(more)), tally), _turn(model, rng.choice(REPLIES), tally)]
    return turns


def _plant_unusable(
    rng: random.Random, fill: Filler, more: list[str], rows: list[Row], names: list[str], tally: Tally
) -> None:
    """Insert the rows that must be skipped, each for one reason."""
    for chunk, name in ((1, names[3]), (2, names[3]), (1, names[20]), (1, names[41]), (2, names[41])):
        turns = [
            _turn("gpt", "and then you press the second button. " + rng.choice(REPLIES), tally),
            _turn("human", fill(rng.choice(more)), tally),
            _turn("gpt", rng.choice(REPLIES), tally),
        ]
        place = 1 + next(index for index, row in enumerate(rows) if row["id"] == f"{name}_{chunk - 1}")
        rows[place:place] = [{"id": f"{name}_{chunk}", "conversations": turns}]
        tally.traps["later_chunk_begins_with_gpt"] += 1
        tally.skipped["not_first_chunk"] += 1
    turns = [
        _turn("human", "and how long does all of that take?", tally),
        _turn("gpt", rng.choice(REPLIES), tally),
    ]
    rows.append({"id": f"{names[50]}_1", "conversations": turns})
    tally.traps["later_chunk_begins_with_human"] += 1
    tally.skipped["not_first_chunk"] += 1

    for place in (9, 66):
        rows[place:place] = [{"id": f"{_name(rng)}_0", "conversations": []}]
        tally.traps["empty_conversations"] += 1
        tally.skipped["empty_conversation"] += 1
    turns = [
        _turn("human", "", tally),
        _turn("gpt", "It seems that your message is empty.", tally),
        _turn("human", fill("oh. I meant to ask about {hobby}"), tally),
        _turn("gpt", rng.choice(REPLIES), tally),
    ]
    rows[30:30] = [{"id": f"{_name(rng)}_0", "conversations": turns}]
    tally.traps["empty_first_value"] += 1
    tally.skipped["empty_prompt"] += 1
    turns = [
        _turn("gpt", "Hello! What can I do for you today?", tally),
        _turn("human", fill("tell me about {hobby} in {country}"), tally),
        _turn("gpt", rng.choice(REPLIES), tally),
    ]
    rows[77:77] = [{"id": f"{_name(rng)}_0", "conversations": turns}]
    tally.traps["first_chunk_begins_with_gpt"] += 1
    tally.skipped["starts_with_assistant"] += 1
