"""Problems for the dataset that the default target answers itself (see answer_native.py)."""

from __future__ import annotations

import operator
import random
import re

from .common import Filler, Row, Tally, cycle, load_phrases, make_id, normalised

FILE = "kimi_native.jsonl"
COLUMNS = ("id", "source", "problem", "expected_answer", "thinking", "response", "teacher", "thinking_tokens")
TEACHER = "SmolLM2-135M-Instruct"
ROWS = 80
PROBLEMS = 220

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def problems(rng: random.Random) -> list[Row]:
    """Return distinct problems, all columns filled but the answer."""
    fill = Filler(rng)
    sections = load_phrases("kimi_native")
    drawn: list[Row] = []
    seen: set[str] = set()
    wanted = -(-PROBLEMS // len(sections))
    for source, phrases in sections.items():
        kept = 0
        for phrase in cycle(rng, phrases, 4 * wanted):
            question, _, sum_ = phrase.partition("\n")
            problem = fill(question)
            if kept == wanted or normalised(problem) in seen:
                continue
            seen.add(normalised(problem))
            kept += 1
            drawn.append(
                {
                    "id": f"native-{make_id(rng, 10)}",
                    "source": source,
                    "problem": problem,
                    "expected_answer": result(sum_, fill.last) if sum_ else "",
                    "thinking": "",
                    "response": "",
                    "teacher": TEACHER,
                    "thinking_tokens": 0,
                }
            )
    rng.shuffle(drawn)
    return drawn[:PROBLEMS]


def result(sum_: str, chosen: dict[str, str]) -> str:
    """Work out a sum such as `a*b` with the numbers that a phrase was filled with."""
    match = re.fullmatch(r"([a-z])([-+*])([a-z])", sum_)
    if match is None:
        raise ValueError(f"not a sum of two numbers: {sum_!r}")
    left, sign, right = match.groups()
    return str(_OPERATIONS[sign](int(chosen[left]), int(chosen[right])))


def tally() -> Tally:
    """Return the counts of the committed file: answers that ended by themselves, no thinking."""
    planted = Tally(usable=ROWS)
    planted.traps["empty_thinking"] = ROWS
    return planted
