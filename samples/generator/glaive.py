"""Function-calling chats: a JSON array of `system` and one `chat` string with marked turns."""

from __future__ import annotations

import json
import random

from .common import (
    Filler,
    Row,
    Sample,
    Tally,
    compose,
    cycle,
    distinct,
    load_phrases,
    normalised,
    unique_fills,
)

WITH_TOOLS = (
    "SYSTEM: You are an assistant that can call the functions listed here. Call one when it helps -\n"
)
WITHOUT_TOOLS = "SYSTEM: You are an assistant without access to any outside functions. Answer in words.\n"
END = " <|endoftext|>"
GAP = "\n\n\n"


def declare(name: str, description: str, parameters: str) -> str:
    """Return the JSON text that declares a function; `parameters` is `name:type=value; ...`."""
    properties = {}
    for part in parameters.split("; "):
        key, _, kind = part.partition("=")[0].partition(":")
        properties[key] = {"type": kind}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return json.dumps({"name": name, "description": description, "parameters": schema}, indent=4) + "\n"


def call(name: str, parameters: str, fill: Filler, chosen: dict[str, str]) -> str:
    """Return a call whose arguments stand, as a JSON text, between single quotes."""
    arguments: dict[str, object] = {}
    for part in parameters.split("; "):
        head, _, template = part.partition("=")
        key, _, kind = head.partition(":")
        value = fill(template, **chosen)
        arguments[key] = (
            int(value) if kind in ("integer", "number") else value == "true" if kind == "boolean" else value
        )
    quoted = json.dumps(arguments, ensure_ascii=False)
    return f'<functioncall> {{"name": "{name}", "arguments": \'{quoted}\'}}'


def build(rng: random.Random) -> Sample:
    """Write the rows of glaive.json."""
    fill = Filler(rng)
    sections = load_phrases("glaive")
    plain, before, after = (sections.pop(key) for key in ("plain", "before", "after"))
    headers = {name: phrases[0].split("\n") for name, phrases in sections.items()}
    names = list(sections)
    brief = [name for name in names if ";" not in headers[name][1]]
    tally = Tally()
    rows: list[Row] = []
    prompts: list[str] = []
    seen: set[str] = set()

    for number, name in enumerate(names):
        description, parameters, response, answer = headers[name]
        for phrase in sections[name][1:]:
            prompt = unique_fills(fill, [phrase], 1, seen, 1)[0]
            chosen = dict(fill.last)
            prompt = compose(fill, before, prompt, after, share=0.8)
            prompts.append(prompt)
            request = call(name, parameters, fill, chosen)
            chosen = dict(fill.last) | chosen
            returned = fill(response, **chosen)
            chosen |= fill.last
            system = WITH_TOOLS + declare(name, description, parameters)
            tally.traps["system_prefix"] += 1
            if len(prompts) % 9 == 0:
                other = brief[number % len(brief)]
                system += "\n" + declare(other, headers[other][0], headers[other][1])
                tally.traps["several_functions"] += 1
            chat = f"USER: {prompt}{GAP}ASSISTANT: {request}{END}{GAP}FUNCTION RESPONSE: {returned}"
            tally.traps["single_quoted_arguments"] += 1
            kind = len(prompts) % 13
            if kind == 3:
                tally.traps["ends_with_function_response"] += 1
            else:
                chat += f"{GAP}ASSISTANT: {fill(answer, **chosen)}{END}"
                if kind == 6:
                    chat += f"{GAP}USER: Thanks, that is all I needed."
                    tally.traps["ends_with_user"] += 1
                elif kind % 2:
                    chat += f"{GAP}USER: Thank you!{GAP}ASSISTANT: You are welcome.{END}"
            rows.append({"system": system, "chat": chat + "\n\n"})
            tally.usable += 1

    for phrase in cycle(rng, plain, len(plain)):
        prompt = compose(fill, before, unique_fills(fill, [phrase], 1, seen, 1)[0], after, share=0.8)
        prompts.append(prompt)
        reply = "I cannot reach other services from here, but I am happy to help in words."
        rows.append({"system": WITHOUT_TOOLS, "chat": f"USER: {prompt}{GAP}ASSISTANT: {reply}{END}\n"})
        tally.usable += 1
        tally.traps["system_prefix"] += 1
        tally.traps["no_functions"] += 1

    for place in ("login window", "help form"):
        prompt = f"My screen shows nothing at all. Where do I type my name in the {place}?"
        prompts.append(prompt)
        reply = f"Open the {place}, type USER: in the box and your name after it, then press Enter."
        rows.append({"system": WITHOUT_TOOLS, "chat": f"USER: {prompt}{GAP}ASSISTANT: {reply}{END}\n"})
        tally.usable += 1
        tally.traps["system_prefix"] += 1
        tally.traps["no_functions"] += 1
        tally.traps["marker_inside_line"] += 1

    distinct(prompts)
    rng.shuffle(rows)

    first_prompt = normalised(prompts[0])
    original = next(row for row in rows if first_prompt in normalised(row["chat"]))
    again = original["chat"].replace("ASSISTANT: ", "ASSISTANT: Let me see. ", 1)
    rows.append({"system": original["system"], "chat": again})
    tally.skipped["duplicate_prompt"] += 1
    tally.traps["duplicate_first_user_turn"] += 1
    tally.traps["system_prefix"] += 1
    tally.traps["single_quoted_arguments"] += 1
    if "ASSISTANT: " not in again.rpartition("FUNCTION RESPONSE: ")[2]:
        tally.traps["ends_with_function_response"] += 1

    orphan = 'FUNCTION RESPONSE: {"status": "ok"}' + f"{GAP}ASSISTANT: The call went through.{END}\n"
    rows.append({"system": WITHOUT_TOOLS, "chat": orphan})
    tally.skipped["no_user_turn"] += 1
    tally.traps["no_user_turn"] += 1
    tally.traps["system_prefix"] += 1
    tally.traps["no_functions"] += 1
    return Sample("glaive.json", rows, tally)
