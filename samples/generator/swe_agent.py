"""Trajectories of a coding agent: parquet, roles system/user/ai, the system text in its own field."""

from __future__ import annotations

import random

import pyarrow as pa

from .common import Filler, Row, Sample, Tally, cycle, distinct, load_phrases
from .libraries import LIBRARIES, Library, assign

STEP = pa.struct(
    [
        ("cutoff_date", pa.string()),
        ("mask", pa.bool_()),
        ("role", pa.string()),
        ("system_prompt", pa.string()),
        ("text", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("instance_id", pa.string()),
        ("model_name", pa.string()),
        ("target", pa.bool_()),
        ("trajectory", pa.list_(STEP)),
        ("exit_status", pa.string()),
        ("generated_patch", pa.string()),
        ("eval_logs", pa.string()),
    ]
)

SYSTEM = (
    "SETTING: You work alone in a terminal on a code repository. Besides the usual shell commands there are "
    "open, goto, create, edit, search_dir, search_file, find_file and submit. Answer with a short discussion "
    "and then exactly one command in a code block."
)
TASK = (
    "An issue was reported in this repository:\n"
    "ISSUE:\n{issue}\n\n"
    "INSTRUCTIONS:\nSolve the issue on your own. Say first what you think is wrong, then give one command "
    "and wait for its output."
)
MODELS = ("swe-agent-llama-70b", "swe-agent-llama-8b", "swe-agent-llama-405b")
EXITS = ("submitted", "submitted", "submitted", "submitted (exit_context)", "early_exit")
ISSUES = 92
REPEATS = 19


def step(role: str, text: str | None, system_prompt: str | None = None) -> Row:
    """Return a step; only the system step has a cutoff date and a prompt, only the model's are masked in."""
    return {
        "cutoff_date": "01.01.2023" if role == "system" else None,
        "mask": role == "ai",
        "role": role,
        "system_prompt": system_prompt,
        "text": text,
    }


def make_row(rng: random.Random, library: Library, instance_id: str, task: str) -> Row:
    """Return a trajectory of two commands and a submission."""
    opening = rng.choice(("Let me look at the file first.", "I start with the code that the issue names."))
    path = library.slots()["module"]
    trajectory = [
        step("system", None, SYSTEM),
        step("user", task),
        step("ai", f"DISCUSSION\n{opening}\n```\nopen {path}\n```"),
        step(
            "user",
            f"[File: {path} ({rng.randint(60, 700)} lines total)]\n(Open file: {path})\nbash-$",
        ),
        step("ai", f"The function is here, so I run its tests.\n```\npytest -q tests -k {library.func}\n```"),
        step("user", f"{rng.randint(1, 3)} failed, {rng.randint(2, 30)} passed\n(Open file: {path})\nbash-$"),
        step("ai", "The change is in place.\n```\nsubmit\n```"),
    ]
    return {
        "instance_id": instance_id,
        "model_name": rng.choice(MODELS),
        "target": rng.random() < 0.2,
        "trajectory": trajectory,
        "exit_status": rng.choice(EXITS),
        "generated_patch": f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-old\n+new\n",
        "eval_logs": "Checking the patch.\nApplied.\n",
    }


def build(rng: random.Random) -> Sample:
    """Write the rows of swe_agent.parquet."""
    fill = Filler(rng)
    sections = load_phrases("swe_agent")
    tally = Tally()
    rows: list[Row] = []
    pairs = assign(cycle(rng, sections["issue"], ISSUES))
    for number, (phrase, library) in enumerate(pairs):
        slots = library.slots()
        notes = [fill(rng.choice(sections["place"]), **slots), rng.choice(sections["wish"])]
        issue = fill(phrase, **slots) + "\n" + " ".join(notes[: 1 + number % 2])
        task = TASK.format(issue=issue)
        instance_id = f"{library.owner}__{library.repo}-{100 + 7 * number + rng.randint(0, 6)}"
        rows.append(make_row(rng, library, instance_id, task))
        tally.usable += 1
    distinct(row["trajectory"][1]["text"] for row in rows)
    distinct(row["instance_id"] for row in rows)

    original, library = rows[8], pairs[8][1]
    for _ in range(REPEATS):
        again = make_row(rng, library, original["instance_id"], original["trajectory"][1]["text"])
        rows.append(again)
        tally.skipped["duplicate_prompt"] += 1
    tally.traps["trajectories_of_one_issue"] += 1 + REPEATS
    rng.shuffle(rows)

    for place in (11, 40, 83):
        rows[place]["trajectory"][4]["text"] = None
        tally.traps["null_text_of_ai"] += 1
    silent = make_row(rng, LIBRARIES[0], "brackwater__tidelog-99", "")
    silent["trajectory"] = [step("system", None, SYSTEM), step("user", None), step("user", "\n")]
    silent |= {"exit_status": "early_exit", "generated_patch": "", "target": False}
    rows[25:25] = [silent]
    tally.skipped["no_user_turn"] += 1
    tally.traps["no_user_text"] += 1
    tally.traps["system_text_in_system_prompt"] += len(rows)
    return Sample("swe_agent.parquet", rows, tally, SCHEMA)
