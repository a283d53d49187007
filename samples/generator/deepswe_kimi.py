"""Agent conversations with their answers: JSONL, calls and observations as plain text."""

from __future__ import annotations

import random

from .common import Filler, Row, Sample, Tally, cycle, distinct, load_phrases
from .libraries import LIBRARIES, assign

SYSTEM = (
    "You are a programming agent. You work in a repository and may use these functions, one in each turn: "
    "file_editor (command, path, old, new), execute_bash (cmd), search (term, path) and finish. "
    "Write a short thought, then the call."
)
FINISHED = "<<< Finished >>>"
CONVERSATIONS = 76


def call(name: str, **parameters: str) -> str:
    """Return the text of a call as the agent writes it."""
    lines = [f"  <parameter={key}>{value}</parameter>" for key, value in parameters.items()]
    return "\n".join([f"<function={name}>", *lines, "</function>"])


def message(role: str, content: str) -> Row:
    """Return one message."""
    return {"role": role, "content": content}


def conversation(
    rng: random.Random, sections: dict[str, list[str]], issue: str, slots: dict[str, str]
) -> list[Row]:
    """Return an agent's work on the issue in one, two or three calls, the last of them `finish`."""
    path = f"/testbed/{slots['module']}"
    line = rng.randint(12, 240)
    looks = [
        (
            call("search", term=slots["func"], path="/testbed"),
            f"Output of [search]:\n{path}:{line}: def {slots['func']}(items, {slots['option']}=None):",
        ),
        (
            call("file_editor", command="view", path=path),
            f"Output of [file_editor]:\n{line}  def {slots['func']}(items):\n{line + 1}      return items[0]",
        ),
    ]
    edits = [
        (
            call(
                "file_editor",
                command="replace",
                path=path,
                old="return items[0]",
                new="return items[0] if items else None",
            ),
            f"Output of [file_editor]:\n{path} was edited.",
        ),
        (
            call("execute_bash", cmd=f"cd /testbed && python -m pytest -q -k {slots['func']}"),
            f"Output of [execute_bash]:\n{rng.randint(2, 40)} passed in 0.{rng.randint(10, 99)}s",
        ),
    ]
    messages = [
        message("system", SYSTEM),
        message("user", f"<github_issue>\n{issue}\n</github_issue>\nThe repository is in /testbed."),
    ]
    length = rng.choice((1, 2, 2))
    thoughts = [rng.choice(sections["look"]), rng.choice(sections[rng.choice(("found", "test"))])]
    for number in range(length):
        if number == 0:
            action, output = rng.choice(looks)
        else:
            action, output = edits[0] if thoughts[1] in sections["found"] else edits[1]
        messages += [message("assistant", f"{thoughts[number]}\n\n{action}"), message("user", output)]
    messages += [message("assistant", f"{rng.choice(sections['finish'])}\n\n{call('finish')}")]
    return messages


def build(rng: random.Random) -> Sample:
    """Write the rows of deepswe_kimi.jsonl."""
    fill = Filler(rng)
    sections = load_phrases("deepswe_kimi")
    tally = Tally()
    rows: list[Row] = []
    for number, (phrase, library) in enumerate(assign(cycle(rng, sections["issue"], CONVERSATIONS))):
        slots = library.slots()
        issue = f"{fill(phrase, **slots)} {fill(rng.choice(sections['context']), **slots)}"
        messages = conversation(rng, sections, issue, slots)
        if number % 10 != 9:
            messages.append(message("user", FINISHED if number % 4 else "<<< Finished: the time is up >>>"))
            tally.traps["ends_with_finished"] += 1
        rows.append({"messages": messages})
        tally.usable += 1
    distinct(row["messages"][1]["content"] for row in rows)

    for number in (6, 29):
        first = rows[number]["messages"][:2]
        rest = [
            message("assistant", f"I cannot reproduce this.\n\n{call('finish')}"),
            message("user", FINISHED),
        ]
        rows.append({"messages": first + rest})
        tally.skipped["duplicate_prompt"] += 1
        tally.traps["repeated_issue"] += 1
        tally.traps["ends_with_finished"] += 1
    mute_slots = LIBRARIES[0].slots()
    mute = fill("`{func}` should close its file when it fails half way. See {module}.", **mute_slots)
    messages = [message("system", SYSTEM), message("user", f"<github_issue>\n{mute}\n</github_issue>")]
    messages += [message("assistant", " \n"), message("user", "No call was found in your answer.")]
    messages += [message("assistant", "\n\n"), message("user", FINISHED)]
    rows[51:51] = [{"messages": messages}]
    tally.skipped["no_supervised_text"] += 1
    tally.traps["blank_assistant_turns"] += 1
    tally.traps["ends_with_finished"] += 1
    tally.traps["identical_system_prompt"] += len(rows)
    rows[14:14] = [{"messages": []}]
    tally.skipped["empty_conversation"] += 1
    tally.traps["empty_messages"] += 1
    return Sample("deepswe_kimi.jsonl", rows, tally)
