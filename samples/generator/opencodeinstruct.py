"""Coding tasks with unit tests: parquet, every column a string, twelve domains."""

from __future__ import annotations

import json
import random

import pyarrow as pa

from .common import ONLY_TURN_BLANK, Filler, Row, Sample, Tally, distinct, load_phrases, make_id, unique_fills

COLUMNS = (
    "id",
    "input",
    "output",
    "domain",
    "generation_algorithm",
    "llm_judgement",
    "unit_tests",
    "tests_execution_status",
    "average_test_score",
)
SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])

ENDINGS = (
    "",
    "Mention how the running time grows with the input.",
    "Do it in one function without helpers.",
    "Write it so that {name}, who is new to Python, can read it.",
    "Then give two test cases, one of them unusual.",
    "Raise a clear error if the argument has the wrong type.",
    "Keep the code short.",
    "Add type hints and a docstring.",
    "Handle an empty input sensibly.",
    "Show one example call at the end.",
    "Please use clear names for the variables.",
    "Explain the idea in one sentence before the code.",
)
CONTEXTS = (
    "",
    "Here is a small piece of work for the {app} of {name}.",
    "Our {place} in {city} runs a few Python scripts, and one of them needs this.",
    "I teach {subject} and want to show my pupils a bit of programming.",
    "This is task number {2-40} on my list for {day}.",
    "The next step in our {app} is the following, and it should work with Python 3.11.",
    "At the {event} we had a coding round, and this was one of the questions.",
    "I wrote a version of this for a {shop}, but it is far too long.",
    "I look after the {app} of a {place}.",
    "This is an exercise from my evening course.",
    "We are cleaning up old scripts at the {shop} where I work.",
    "For a small {app} that runs once a day I need the following.",
    "My colleague {name} asked me for a helper.",
    "A test in our project covers this behaviour but the code is missing.",
    "I am learning Python and would like to see a clean solution.",
    "The data comes from the {place} in {city} and has about {2-90} thousand entries.",
    "Solve this coding task in Python.",
)
ANSWERS = (
    "```python\ndef solve(value):\n    result = []\n    for item in value:\n        result.append(item)\n"
    "    return result\n```",
    "The function goes through the input once.\n\n```python\ndef solve(value):\n    seen = {}\n"
    "    for item in value:\n        seen[item] = seen.get(item, 0) + 1\n    return seen\n```",
    "```python\ndef solve(value, default=None):\n    if not value:\n        return default\n"
    "    return value[0]\n```",
)


def make_row(rng: random.Random, prompt: str, domain: str) -> Row:
    """Return a row; structured columns hold JSON text, the score is a number written as text."""
    passed = rng.randint(1, 4)
    status = ["pass"] * passed + ["fail"] * (4 - passed)
    tests = [f"\nassert solve({json.dumps([case, case + 1])}) is not None" for case in range(4)]
    judgement = {
        "requirement_conformance": {"score": rng.randint(2, 5), "justification": "Follows the task."}
    }
    return {
        "id": make_id(rng, 32),
        "input": prompt,
        "output": rng.choice(ANSWERS),
        "domain": domain,
        "generation_algorithm": rng.choice(("self-instruct", "evol-instruct")),
        "llm_judgement": json.dumps(judgement),
        "unit_tests": json.dumps(tests),
        "tests_execution_status": json.dumps(status),
        "average_test_score": str(passed / 4),
    }


def build(rng: random.Random) -> Sample:
    """Write the rows of opencodeinstruct.parquet."""
    fill = Filler(rng)
    tally = Tally()
    rows = []
    seen: set[str] = set()
    for domain, phrases in load_phrases("opencodeinstruct").items():
        for prompt in unique_fills(fill, phrases, len(phrases), seen):
            ending = fill(rng.choice(ENDINGS))
            context = fill(rng.choice(CONTEXTS))
            rows.append(make_row(rng, f"{context} {prompt} {ending}".strip(), domain))
            tally.usable += 1
    distinct(row["input"] for row in rows)
    rng.shuffle(rows)

    repeated = dict(rows[5], id=make_id(rng, 32), average_test_score="0.5")
    blank = make_row(rng, " \n\t ", "parsing")
    empty = make_row(rng, "", "strings")
    rows[20:20] = [empty]
    rows[45:45] = [blank]
    rows.append(repeated)
    tally.skipped[ONLY_TURN_BLANK] += 2
    tally.skipped["duplicate_prompt"] += 1
    tally.traps.update({"empty_input": 1, "blank_input": 1, "exact_duplicate": 1})
    return Sample("opencodeinstruct.parquet", rows, tally, SCHEMA)
