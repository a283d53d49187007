"""The committed sample datasets: reproducible, complete, and with the traps that expected.json names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
Row = dict[str, Any]

FILES = {
    "deepswe_kimi": "deepswe_kimi.jsonl",
    "kimi_native": "kimi_native.jsonl",
    "glaive": "glaive.json",
    "opencodeinstruct": "opencodeinstruct.parquet",
    "magicoder": "magicoder.jsonl",
    "mixture_of_thoughts": "mixture_of_thoughts.parquet",
    "openthoughts": "openthoughts.parquet",
    "ultrachat": "ultrachat.parquet",
    "sharegpt": "sharegpt.json",
    "swe_agent": "swe_agent.parquet",
}
COLUMNS = {
    "deepswe_kimi": "messages",
    "kimi_native": "id source problem expected_answer thinking response teacher thinking_tokens",
    "glaive": "system chat",
    "opencodeinstruct": "id input output domain generation_algorithm llm_judgement unit_tests"
    " tests_execution_status average_test_score",
    "magicoder": "lang raw_index index seed openai_fingerprint problem solution",
    "mixture_of_thoughts": "messages num_tokens source",
    "openthoughts": "system conversations",
    "ultrachat": "prompt prompt_id messages",
    "sharegpt": "id conversations",
    "swe_agent": "instance_id model_name target trajectory exit_status generated_patch eval_logs",
}
ROLES = {
    "deepswe_kimi": ("messages", "role", {"system", "user", "assistant"}),
    "mixture_of_thoughts": ("messages", "role", {"user", "assistant"}),
    "openthoughts": ("conversations", "from", {"user", "assistant"}),
    "ultrachat": ("messages", "role", {"user", "assistant"}),
    "sharegpt": ("conversations", "from", {"human", "gpt", "system", "user", "chatgpt", "bing", "bard"}),
    "swe_agent": ("trajectory", "role", {"system", "user", "ai"}),
}
NATIVE = ("deepswe_kimi", "kimi_native")
REASONS = {
    "empty_conversation",
    "no_user_turn",
    "empty_prompt",
    "not_first_chunk",
    "starts_with_assistant",
    "duplicate_prompt",
    "no_supervised_text",
}


def read_rows(path: Path) -> list[Row]:
    """Read a raw file without any of the project's own readers."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.split("\n") if line]
    return json.loads(text)


@pytest.fixture(scope="module")
def expected() -> dict[str, Row]:
    return json.loads((SAMPLES / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    return {name: read_rows(SAMPLES / file) for name, file in FILES.items()}


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    command = [sys.executable, str(SAMPLES / "generate_samples.py"), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return folder


@pytest.mark.parametrize("file", [*FILES.values(), "expected.json"])
def test_the_generator_makes_the_committed_files(regenerated: Path, file: str) -> None:
    if file == FILES["kimi_native"]:
        assert not (regenerated / file).exists(), "the target answers these, see answer_native.py"
    elif file.endswith(".parquet"):
        again, committed = pq.read_table(regenerated / file), pq.read_table(SAMPLES / file)
        assert again.schema == committed.schema
        assert again.to_pylist() == committed.to_pylist()
    else:
        assert (regenerated / file).read_bytes() == (SAMPLES / file).read_bytes()


def test_expected_names_all_datasets_and_only_known_reasons(expected: dict[str, Row]) -> None:
    assert set(expected) == set(FILES)
    assert {reason for counts in expected.values() for reason in counts["skipped"]} <= REASONS


@pytest.mark.parametrize("name", FILES)
def test_rows_add_up(expected: dict[str, Row], rows: dict[str, list[Row]], name: str) -> None:
    counts = expected[name]
    assert counts["rows"] == len(rows[name]) == counts["usable"] + sum(counts["skipped"].values())
    assert counts["usable"] >= (72 if name in NATIVE else 88)


@pytest.mark.parametrize("name", FILES)
def test_every_row_has_exactly_the_columns_of_the_layout(rows: dict[str, list[Row]], name: str) -> None:
    assert {tuple(row) for row in rows[name]} == {tuple(COLUMNS[name].split())}


@pytest.mark.parametrize("name", ROLES)
def test_no_role_is_outside_the_vocabulary_and_none_is_unused(rows: dict[str, list[Row]], name: str) -> None:
    column, key, vocabulary = ROLES[name]
    assert {turn[key] for row in rows[name] for turn in row[column]} == vocabulary


def test_parquet_types_are_those_of_the_layouts() -> None:
    def schema(name: str) -> pa.Schema:
        return pq.read_schema(SAMPLES / FILES[name])

    assert set(schema("opencodeinstruct").types) == {pa.string()}
    message = pa.struct([("content", pa.string()), ("role", pa.string())])
    # Parquet readers may name the element of a list differently, which says nothing about the layout.
    assert schema("mixture_of_thoughts").field("messages").type.value_type == message
    assert schema("mixture_of_thoughts").field("num_tokens").type == pa.int64()
    assert schema("ultrachat").field("messages").type.value_type == message
    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    assert schema("openthoughts").field("conversations").type.value_type == turn
    step = schema("swe_agent").field("trajectory").type.value_type
    assert [field.name for field in step] == ["cutoff_date", "mask", "role", "system_prompt", "text"]
    assert schema("swe_agent").field("target").type == pa.bool_()


def test_kimi_native_holds_finished_answers_to_the_generated_problems(rows: dict[str, list[Row]]) -> None:
    problems = [row["problem"] for row in rows["kimi_native"]]
    assert len(set(problems)) == len(problems)
    assert all(row["response"].strip() and "<|im_end|>" not in row["response"] for row in rows["kimi_native"])
    assert {row["teacher"] for row in rows["kimi_native"]} == {"SmolLM2-135M-Instruct"}
    script = (
        "import json, random\nfrom generator import kimi_native\nfrom generate_samples import SEED\n"
        "print(json.dumps([row['problem'] for row in kimi_native.problems(random.Random(SEED))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=SAMPLES, check=True, capture_output=True, text=True
    )
    asked = json.loads(done.stdout)
    places = [asked.index(problem) for problem in problems]
    assert places == sorted(places)


def blank(text: str | None) -> bool:
    return text is None or not text.strip()


def flat(text: str) -> str:
    return " ".join(text.split())


def texts(row: Row, *roles: str) -> list[str]:
    """The texts of a row's turns, of the given roles or of all."""
    turns = row.get("messages") or row.get("conversations") or []
    found = []
    for turn in turns:
        role = turn.get("role") or turn.get("from")
        if not roles or role in roles:
            found.append(turn["content"] if "content" in turn else turn["value"])
    return found


def first_role(row: Row) -> str | None:
    spoken = [turn["from"] for turn in row["conversations"] if turn["from"] != "system"]
    return spoken[0] if spoken else None


def human_texts(row: Row) -> str:
    return "\n".join(texts(row, "human", "user"))


def glaive_first_user(row: Row) -> str:
    match = re.search(r"(?:^|\n)USER: (.*?)(?=\n\n\n|$)", row["chat"], re.S)
    return match.group(1) if match else ""


def repeats(values: list[Any]) -> int:
    return sum(times - 1 for times in Counter(values).values())


def later_chunk(row: Row) -> bool:
    return not row["id"].endswith("_0")


MODEL_ROLES = ("gpt", "chatgpt", "bing", "bard")
Count = Callable[[list[Row]], int]


def each(test: Callable[[Row], Any]) -> Count:
    """Count the rows that pass the test."""
    return lambda rows: sum(bool(test(row)) for row in rows)


def role_count(role: str) -> Count:
    return lambda rows: sum(turn["from"] == role for row in rows for turn in row["conversations"])


TRAPS: dict[str, dict[str, Count]] = {
    "deepswe_kimi": {
        "blank_assistant_turns": each(lambda r: r["messages"] and all(map(blank, texts(r, "assistant")))),
        "empty_messages": each(lambda r: r["messages"] == []),
        "ends_with_finished": each(
            lambda r: (
                r["messages"]
                and r["messages"][-1]["role"] == "user"
                and r["messages"][-1]["content"].startswith("<<< Finished")
            )
        ),
        "identical_system_prompt": lambda rows: max(
            Counter(t for r in rows for t in texts(r, "system")).values()
        ),
        "repeated_issue": lambda rows: repeats([flat(texts(r, "user")[0]) for r in rows if r["messages"]]),
    },
    "kimi_native": {"empty_thinking": each(lambda r: r["thinking"] == "" and r["thinking_tokens"] == 0)},
    "glaive": {
        "duplicate_first_user_turn": lambda rows: repeats([flat(glaive_first_user(r)) for r in rows]),
        "ends_with_function_response": each(
            lambda r: r["chat"].rstrip().split("\n\n\n")[-1].startswith("FUNCTION RESPONSE: ")
        ),
        "ends_with_user": each(lambda r: r["chat"].rstrip().split("\n\n\n")[-1].startswith("USER: ")),
        "marker_inside_line": each(lambda r: re.search(r"[a-z] USER: ", r["chat"])),
        "no_functions": each(lambda r: '"parameters"' not in r["system"]),
        "no_user_turn": each(lambda r: not re.search(r"(^|\n)USER:", r["chat"])),
        "several_functions": each(lambda r: r["system"].count('"parameters"') > 1),
        "single_quoted_arguments": each(lambda r: re.search(r"\"arguments\": '\{.*\}'\}", r["chat"])),
        "system_prefix": each(lambda r: r["system"].startswith("SYSTEM: ")),
    },
    "opencodeinstruct": {
        "blank_input": each(lambda r: r["input"] and blank(r["input"])),
        "empty_input": each(lambda r: r["input"] == ""),
        "exact_duplicate": lambda rows: repeats([r["input"] for r in rows]),
    },
    "magicoder": {
        "duplicated_index": lambda rows: repeats([r["index"] for r in rows]),
        "null_problem": each(lambda r: r["problem"] is None),
        "seed_is_code": each(lambda r: isinstance(r["seed"], str) and "\n" in r["seed"]),
    },
    "mixture_of_thoughts": {
        "duplicate_but_for_trailing_whitespace": lambda rows: repeats(
            [texts(r)[0].rstrip() for r in rows if r["messages"]]
        ),
        "empty_messages": each(lambda r: r["messages"] == []),
        "starts_with_assistant": each(lambda r: r["messages"] and r["messages"][0]["role"] == "assistant"),
    },
    "openthoughts": {
        "boxed_instruction": each(lambda r: "\\boxed" in "".join(texts(r, "user"))),
        "empty_conversations": each(lambda r: r["conversations"] == []),
        "openai_names_under_from": each(
            lambda r: [turn["from"] for turn in r["conversations"]] == ["user", "assistant"]
        ),
        "thought_format_in_system": each(lambda r: "<|begin_of_thought|>" in r["system"]),
    },
    "ultrachat": {
        "empty_user_content": each(lambda r: "" in texts(r, "user")),
        "ends_with_user": each(lambda r: r["messages"][-1]["role"] == "user"),
        "line_separator_in_user_turn": each(lambda r: "\u2028" in "".join(texts(r, "user"))),
        "next_line_in_user_turn": each(lambda r: "\u0085" in "".join(texts(r, "user"))),
        "separators_in_answer": each(
            lambda r: (
                "\u2028" in "".join(texts(r, "assistant")) and "\u0085" in "".join(texts(r, "assistant"))
            )
        ),
        "several_turns": each(lambda r: len(texts(r, "user")) > 1),
    },
    "sharegpt": {
        "code_label_in_human_turn": each(lambda r: "Copy code" in human_texts(r)),
        "consecutive_same_role": each(
            lambda r: any(
                a["from"] == b["from"]
                for a, b in zip(r["conversations"], r["conversations"][1:], strict=False)
            )
        ),
        "control_tokens_in_human_turn": each(lambda r: "<|im_" in human_texts(r)),
        "empty_answer": each(lambda r: "" in texts(r, *MODEL_ROLES)),
        "empty_conversations": each(lambda r: r["conversations"] == []),
        "empty_first_value": each(lambda r: r["conversations"] and r["conversations"][0]["value"] == ""),
        "first_chunk_begins_with_gpt": each(lambda r: not later_chunk(r) and first_role(r) == "gpt"),
        "html_in_human_turn": each(lambda r: re.search(r"<div>|<p>|&lt;", human_texts(r))),
        "later_chunk_begins_with_gpt": each(lambda r: later_chunk(r) and first_role(r) == "gpt"),
        "later_chunk_begins_with_human": each(lambda r: later_chunk(r) and first_role(r) == "human"),
        "line_separator_in_answer": each(lambda r: "\u2028" in "".join(texts(r, *MODEL_ROLES))),
        "line_separator_in_human_turn": each(lambda r: "\u2028" in human_texts(r)),
        "scraped_answer": each(
            lambda r: re.search(r"Copy code|<div|<br>|&lt;", "".join(texts(r, *MODEL_ROLES)))
        ),
        **{f"role_{role}": role_count(role) for role in ("human", "user", "system", *MODEL_ROLES)},
    },
    "swe_agent": {
        "no_user_text": each(lambda r: all(blank(s["text"]) for s in r["trajectory"] if s["role"] == "user")),
        "null_text_of_ai": each(
            lambda r: any(s["text"] is None for s in r["trajectory"] if s["role"] == "ai")
        ),
        "system_text_in_system_prompt": each(
            lambda r: (
                r["trajectory"][0]["role"] == "system"
                and r["trajectory"][0]["text"] is None
                and not blank(r["trajectory"][0]["system_prompt"])
            )
        ),
        "trajectories_of_one_issue": lambda rows: max(
            Counter((r["instance_id"], r["trajectory"][1]["text"]) for r in rows).values()
        ),
    },
}


@pytest.mark.parametrize("name", FILES)
def test_each_trap_is_there_as_often_as_expected(
    expected: dict[str, Row], rows: dict[str, list[Row]], name: str
) -> None:
    found = {trap: count(rows[name]) for trap, count in TRAPS[name].items()}
    assert found == expected[name]["traps"]


def test_families_are_large_enough_to_split_off(rows: dict[str, list[Row]]) -> None:
    for name, column, families in (
        ("opencodeinstruct", "domain", 12),
        ("magicoder", "lang", 10),
        ("mixture_of_thoughts", "source", 10),
    ):
        sizes = Counter(row[column] for row in rows[name])
        assert len(sizes) == families
        assert min(sizes.values()) >= 5
    assert len({row["instance_id"] for row in rows["swe_agent"]}) >= 88


def test_the_samples_stay_small() -> None:
    size = sum(
        path.stat().st_size
        for path in SAMPLES.rglob("*")
        if path.is_file()
        and not any(part.startswith((".", "__")) for part in path.relative_to(SAMPLES).parts)
    )
    assert size < 2_000_000


def test_the_readme_explains_every_trap(expected: dict[str, Row]) -> None:
    readme = (SAMPLES / "README.md").read_text(encoding="utf-8")
    traps = {trap for counts in expected.values() for trap in counts["traps"] if not trap.startswith("role_")}
    assert {trap for trap in traps if f"`{trap}`" not in readme} == set()
