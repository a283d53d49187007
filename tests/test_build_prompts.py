"""From raw files to prompts: the samples' known counts, the rules one by one, and the words of a refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fetch_raw
from eyrie.config import ConfigError, DatasetSettings
from eyrie.gates import GateError
from eyrie.prompts import Prompts
from eyrie.questions import prompt_id, turns_id
from eyrie.records import RecordError, content_key, json_line, read_json, sha256_file, write_json

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "samples"
KIMI = {"kind": "native", "native_model": "moonshotai/Kimi-K2-Instruct"}

# The default build's datasets: how their samples are read.
DATASETS: dict[str, dict[str, Any]] = {
    "deepswe_kimi": {"layout": "messages", **KIMI},
    "kimi_native": {"layout": "reasoning_pairs", **KIMI},
    "glaive": {"layout": "chat_string", "prompt": "system_and_first_user"},
    "opencodeinstruct": {"layout": "pairs", "fields": {"prompt": "input"}, "group_by": "domain"},
    "magicoder": {"layout": "pairs", "fields": {"prompt": "problem"}, "group_by": "lang"},
    "mixture_of_thoughts": {"layout": "messages", "group_by": "source"},
    "openthoughts": {"layout": "sharegpt"},
    "ultrachat": {"layout": "messages"},
    "sharegpt": {"layout": "sharegpt_chunks"},
    "swe_agent": {"layout": "trajectory", "group_by": "instance_id"},
}


@dataclass(frozen=True)
class Built:
    """What a build of one dataset left in its folder."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def rows(self) -> list[dict[str, Any]]:
        return lines(self.out)

    @property
    def ledger(self) -> dict[str, Any]:
        return read_json(self.folder / "ledger.json")

    @property
    def rejects(self) -> list[dict[str, Any]]:
        return lines(self.folder / "rejects.jsonl")

    @property
    def failed(self) -> Path:
        return self.folder / "ledger.json.failed.json"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def entry(files: list[str], file_format: str, **changes: Any) -> DatasetSettings:
    plain = {"licence": "mit", "kind": "prompts", "source": {"files": files, "format": file_format}}
    return DatasetSettings.model_validate(plain | changes)


def build_files(folder: Path, made: DatasetSettings, dataset: str = "d") -> Built:
    files = fetch_raw.fetch(dataset, made.source, folder / "raw")
    described = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)} for file in files
    ]
    write_json(folder / "raw" / "source.json", {"dataset": dataset, "files": described})
    built = Built(folder)
    prompts = Prompts(dataset, made, folder / "raw" / "source.json")
    prompts.write(built.out, folder / "ledger.json", folder / "rejects.jsonl")
    return built


def build(folder: Path, raw: list[Any], **changes: Any) -> Built:
    """Build rows of messages, or of the layout in `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in raw), encoding="utf-8")
    made = entry([str(folder / "rows.jsonl")], "jsonl", **{"layout": "messages"} | changes)
    return build_files(folder, made)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


# --- the samples --------------------------------------------------------------------------------------------


def sample(name: str) -> Path:
    return next(
        path for path in sorted(SAMPLES.glob(f"{name}.*")) if path.suffix in (".json", ".jsonl", ".parquet")
    )


@pytest.mark.parametrize("name", DATASETS)
def test_a_sample_gives_the_rows_that_were_planted(tmp_path: Path, name: str) -> None:
    path = sample(name)
    expected = read_json(SAMPLES / "expected.json")[name]
    built = build_files(tmp_path, entry([str(path)], path.suffix[1:], **DATASETS[name]), name)

    found = {"rows": built.ledger["in"], "usable": built.ledger["kept"], "skipped": built.ledger["skipped"]}
    assert found == {key: expected[key] for key in ("rows", "usable", "skipped")}
    assert len(built.rows) == expected["usable"]
    assert len(built.rejects) == expected["rows"] - expected["usable"]
    for row in built.rows:
        assert row["dataset"] == name
        assert row["messages"][-1]["role"] == ("assistant" if DATASETS[name].get("kind") else "user")


def test_a_sample_of_called_functions_keeps_its_system_text(tmp_path: Path) -> None:
    built = build_files(tmp_path, entry([str(sample("glaive"))], "json", **DATASETS["glaive"]), "glaive")
    assert all([made["role"] for made in row["messages"]] == ["system", "user"] for row in built.rows)
    assert not any(row["messages"][0]["content"].startswith("SYSTEM:") for row in built.rows)
    # The system text declares the functions already.
    assert not any("tools" in row for row in built.rows)

    alone = DATASETS["glaive"] | {"prompt": "first_user"}
    built = build_files(tmp_path / "alone", entry([str(sample("glaive"))], "json", **alone), "glaive")
    traps = read_json(SAMPLES / "expected.json")["glaive"]["traps"]
    # One of the rows without functions is the one without a question.
    assert sum("tools" in row for row in built.rows) == 94 - (traps["no_functions"] - 1)


# --- reasons ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty_conversation"),
        ([says("a"), user("b"), says("c")], "starts_with_assistant"),
        ([{"role": "system", "content": "s"}, says("a")], "starts_with_assistant"),
        ([{"role": "system", "content": "s"}], "no_user_turn"),
        ([user(" \n\t"), says("a")], "no_user_turn"),
        ([{"role": "tool", "content": "t"}, says("a")], "no_user_turn"),
        ([user(None), says("a"), user("b")], "empty_prompt"),
        ([user("a"), {"role": "narrator", "content": "b"}], "unknown_role:narrator"),
    ],
)
def test_each_reason(tmp_path: Path, messages: list[Any], reason: str) -> None:
    built = build(tmp_path, [chat(user("fine"), says("a")), chat(*messages)])
    assert (built.ledger["in"], built.ledger["kept"], built.ledger["skipped"]) == (2, 1, {reason: 1})
    assert built.rejects == [{"reason": reason, "position": "rows.jsonl:2", "row": chat(*messages)}]


@pytest.mark.parametrize("answer", [[], [says("")], [says(None)], [{"role": "tool", "content": "t"}]])
def test_a_native_row_needs_an_answer(tmp_path: Path, answer: list[Any]) -> None:
    built = build(tmp_path, [chat(user("fine"), says("a")), chat(user("b"), *answer)], **KIMI)
    assert built.ledger["skipped"] == {"no_supervised_text": 1}
    assert build(tmp_path / "asked", [chat(user("b"), *answer)]).ledger["kept"] == 1


def test_a_line_that_is_no_json_is_counted_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(chat(user("a"))) + '\n{"messages": [NaN]}\n', encoding="utf-8")
    built = build_files(tmp_path, entry([str(path)], "jsonl", layout="messages"))
    assert built.ledger["skipped"] == {"bad_json:not_a_number": 1}
    reject = built.rejects[0]
    assert reject["position"] == "rows.jsonl:2"
    assert reject["row"] == '{"messages": [NaN]}'
    assert "NaN is not JSON" in reject["error"]


# --- prompts and conversations ------------------------------------------------------------------------------

LONG = [
    {"role": "system", "content": "s"},
    user("q"),
    says("a"),
    user("r"),
    says("b"),
    user("bye"),
    user("!"),
]


def test_the_prompt_rules(tmp_path: Path) -> None:
    alone = build(tmp_path / "a", [chat(*LONG)]).rows[0]
    both = build(tmp_path / "b", [chat(*LONG)], prompt="system_and_first_user").rows[0]
    assert alone["messages"] == [user("q")]
    assert both["messages"] == LONG[:2]
    assert alone["id"] == both["id"] == prompt_id("q")


ALL = {"turns": "all", "prompt": "system_and_first_user"}


def test_all_turns_are_asked_without_their_answers(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "4\n", "tool_call_id": "c1", "name": "add"}
    calls = {**says(""), "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": "{}"}}]}
    talk = [{"role": "system", "content": "s"}, user("q"), calls, result, says("a"), user(" "), says("b")]
    talk += [{"role": "system", "content": "more"}, user("bye"), user("!"), says("c")]
    built = build(tmp_path, [chat(*talk), chat(user("x"), says("y"))], **ALL)
    long, short = sorted(built.rows, key=lambda row: -len(row["messages"]))
    assert long["messages"] == [talk[0], talk[1], result, user("bye"), user("!")]
    assert long["turns"] == [2, 1, 2]
    assert short["turns"] == [1]
    assert built.ledger["kept"] == 2
    assert built.ledger["turns"] == 4


def test_one_turn_has_the_id_of_its_prompt_and_several_have_its_group(tmp_path: Path) -> None:
    one, two, other = (
        chat(user(" q\n"), says("1")),
        chat(user("q"), says("2"), user("r  s")),
        chat(user("q"), says("3"), user("t")),
    )
    again = chat({"role": "system", "content": "s"}, user("q "), says("4"), user("r s"))
    built = build(tmp_path, [one, two, other, again], **ALL)
    assert {row["id"] for row in built.rows} == {
        prompt_id("q"), turns_id([user("q"), user("r s")]), content_key("prompt", "q", "t")
    }  # fmt: skip
    assert {row["group"] for row in built.rows} == {prompt_id("q")}
    assert built.ledger["skipped"] == {"duplicate_prompt": 1}


def test_later_turns_are_compared_with_benchmarks_and_other_rows(tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text('{"q": "how many eggs does she sell"}\n')
    long = [f"word{n}" for n in range(40)]
    rows = [
        chat(user("q"), says("a"), user("So how many eggs does she sell?")),
        chat(user("q"), says("a"), user(" ".join(long))),
        chat(user("q"), says("a"), user(" ".join([*long, "end"]))),
    ]
    checks = {"decontaminate": {"files": [str(tmp_path / "bench.jsonl")], "ngram": 5}, "near_duplicates": {}}
    built = build(tmp_path, rows, **ALL, **checks)
    assert built.ledger["skipped"] == {"contaminated": 1, "near_duplicate": 1}


def test_a_native_conversation_ends_with_its_last_answer(tmp_path: Path) -> None:
    built = build(tmp_path, [chat(*LONG), chat(user("x"), says("y"))], **KIMI)
    assert next(row for row in built.rows if row["id"] == prompt_id("q"))["messages"] == LONG[:5]
    assert built.ledger["notes"] == {"cut_after_last_answer": 1}
    assert built.ledger["kept"] == 2


def test_the_id_is_of_the_prompt_alone(tmp_path: Path) -> None:
    one = build(tmp_path / "a", [chat({"role": "system", "content": "s"}, user(" a\n b"), says("c"))], **KIMI)
    two = build(tmp_path / "b", [chat(user("a b "), says("d"), user("e"), says("f"))], **KIMI)
    assert one.rows[0]["id"] == two.rows[0]["id"] == content_key("prompt", "a b")


def test_rejects_stand_in_the_files_order_in_plain_json(tmp_path: Path) -> None:
    raw = [chat(user("a")), chat(user("a")), chat(), chat(user("a\n"))]
    rows = "".join(json.dumps(row) + "\n" for row in raw)
    (tmp_path / 'q"é.jsonl').write_text(rows + "no JSON\n", encoding="utf-8")
    build_files(
        tmp_path, entry([str(tmp_path / 'q"é.jsonl')], "jsonl", layout="messages", gates={"on_fail": "warn"})
    )
    lines = (tmp_path / "rejects.jsonl").read_bytes().splitlines(keepends=True)
    assert lines == [json_line(json.loads(line)) for line in lines]
    assert [(one["reason"], one["position"]) for one in map(json.loads, lines)] == [
        ("duplicate_prompt", 'q"é.jsonl:2'),
        ("empty_conversation", 'q"é.jsonl:3'),
        ("duplicate_prompt", 'q"é.jsonl:4'),
        ("bad_json:syntax", 'q"é.jsonl:5'),
    ]


def test_the_first_of_equal_prompts_is_kept(tmp_path: Path) -> None:
    built = build(tmp_path, [chat(user("a  b"), says("1")), chat(user("c")), chat(user(" a b\n"), says("2"))])
    assert {row["messages"][0]["content"] for row in built.rows} == {"a  b", "c"}
    assert built.ledger["skipped"] == {"duplicate_prompt": 1}
    assert built.rejects == [
        {"reason": "duplicate_prompt", "position": "rows.jsonl:3", "id": prompt_id("a b")}
    ]


def test_a_group_is_a_columns_value(tmp_path: Path) -> None:
    raw = [chat(user(text), info={"issue": issue}) for text, issue in (("a", 7), ("b", 7), ("c", "7"))]
    built = build(
        tmp_path, [*raw, chat(user("d")), chat(user("e"), info={"issue": None})], group_by="info.issue"
    )
    groups = {row["messages"][0]["content"]: row["group"] for row in built.rows}
    assert groups["a"] == groups["b"] == content_key("group", 7) != groups["c"]
    assert built.ledger["skipped"] == {"missing_column:info.issue": 2}


def test_without_a_group_each_prompt_is_its_own(tmp_path: Path) -> None:
    row = build(tmp_path, [chat(user("a"))]).rows[0]
    assert row["group"] == row["id"]


def test_tools_go_along_and_unreadable_ones_are_noted(tmp_path: Path) -> None:
    tools = json.dumps([{"name": "f"}])
    built = build(
        tmp_path, [chat(user("a"), tools=tools), chat(user("b"), tools="see below"), chat(user("c"))]
    )
    found = {row["messages"][0]["content"]: row.get("tools") for row in built.rows}
    assert found == {"a": [{"type": "function", "function": {"name": "f"}}], "b": None, "c": None}
    assert built.ledger["notes"] == {"unreadable_tools": 1}


def test_the_cap_keeps_the_lowest_hashes_whatever_else_is_there(tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(40)]
    built = build(tmp_path, [chat(user(text)) for text in texts], samples=10)
    lowest = sorted((prompt_id(text) for text in texts), key=lambda row_id: content_key("sample", row_id))[
        :10
    ]
    assert [row["id"] for row in built.rows] == sorted(lowest)
    assert built.ledger["skipped"] == {"over_cap": 30}
    assert all(set(reject) == {"reason", "position", "id"} for reject in built.rejects)
    # Rows that come later push out some, and bring back none.
    more = build(tmp_path / "more", [chat(user(text)) for text in [*texts, "x", "y", "z"]], samples=10)
    assert {row["id"] for row in more.rows} - {row["id"] for row in built.rows} <= {
        prompt_id(t) for t in "xyz"
    }


def test_a_group_gives_at_most_so_many_rows(tmp_path: Path) -> None:
    raw = [chat(user(f"task {number}"), issue=number % 2) for number in range(20)]
    built = build(tmp_path, raw, group_by="issue", max_per_group=3, samples=5)
    groups = [row["group"] for row in built.rows]
    assert sorted(groups.count(content_key("group", issue)) for issue in (0, 1)) == [2, 3]
    assert built.ledger["in"] == 20
    assert sum(built.ledger["skipped"].values()) == len(built.rejects) == 15
    assert set(built.ledger["skipped"]) == {"over_cap", "over_group_cap"}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        *("ledger.json", "prompts.jsonl", "rejects.jsonl", "rows.jsonl")
    ]


def test_prompts_that_say_nearly_the_same_are_asked_once(tmp_path: Path) -> None:
    text = "You are given two long lists of numbers and must merge them into a sorted one"
    raw = [chat(user(text), says("1")), chat(user(f"{text.upper()}!")), chat(user("Another question"))]
    assert build(tmp_path / "exact", raw).ledger["kept"] == 3
    built = build(tmp_path / "near", raw, near_duplicates={"threshold": 0.8})
    assert built.ledger["skipped"] == {"near_duplicate": 1}
    assert {reject["position"] for reject in built.rejects} < {"rows.jsonl:1", "rows.jsonl:2"}
    assert build(tmp_path / "back", raw[::-1], near_duplicates={}).out.read_bytes() == built.out.read_bytes()


def test_rows_that_share_text_with_a_benchmark_are_left_out(tmp_path: Path) -> None:
    task = "Write a function that returns the n smallest prime numbers above a given bound"
    benchmark = tmp_path / "benchmark.jsonl"
    benchmark.write_text(json.dumps({"prompt": task, "solution": "x"}) + "\n", encoding="utf-8")
    later = chat(user("hello"), says("hi"), user(f"Now: {task}"), says("no"))
    raw = [chat(user(f"{task}, quickly")), later, chat(user("harmless"), says(task))]
    compared = {"decontaminate": {"files": [str(benchmark)]}}
    built = build(tmp_path / "asked", raw, **compared)
    # Of a prompts dataset, later turns and answers are left out anyway.
    assert [row["messages"][0]["content"] for row in built.rows] == sorted(
        ["hello", "harmless"], key=prompt_id
    )
    shared = "write a function that returns the n smallest prime numbers above a given"
    reject = {"reason": "contaminated", "position": "rows.jsonl:1", "row": raw[0], "shared": shared}
    assert built.rejects == [reject]
    assert built.ledger["benchmarks"] == [{"name": str(benchmark), "sha256": sha256_file(benchmark)}]
    own = build(tmp_path / "native", [*raw, later], gates={"min_kept_share": 0}, **compared, **KIMI)
    assert own.ledger["skipped"] == {"contaminated": 2, "no_supervised_text": 1}


PICTURE = {"type": "image_url", "image_url": {"url": "x.png"}}


def test_media_are_refused_or_left_out(tmp_path: Path) -> None:
    raw = [chat(user([{"type": "text", "text": "What is this?"}, PICTURE]), says("b")), chat(user("c"))]
    refused = build(tmp_path / "refused", raw)
    assert refused.ledger["skipped"] == {"multimodal": 1}
    built = build(tmp_path / "text", raw, media="text_only")
    assert built.ledger["skipped"] == {}
    assert built.ledger["notes"] == {"media_left_out": 1}
    assert {row["messages"][0]["content"] for row in built.rows} == {"What is this?", "c"}


def test_rows_that_others_tokenized_keep_ids_and_mask(tmp_path: Path) -> None:
    raw = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [1, 2, 9], "loss_mask": [0, 0, 1]},
        {"input_ids": [5, 6], "loss_mask": [0, 0]},
    ]
    built = build(tmp_path / "native", raw, layout="pretokenized", **KIMI)
    key = content_key("prompt", [1, 2])
    assert built.rows == [{"id": key, "dataset": "d", "group": key, **raw[0]}]
    assert built.ledger["skipped"] == {"duplicate_prompt": 1, "no_supervised_text": 1}
    with pytest.raises(GateError, match="2 pretokenized_prompt"):
        build(tmp_path / "asked", raw, layout="pretokenized")
    with pytest.raises(ConfigError, match=r"datasets\.d\.decontaminate: compares texts, but .* token ids"):
        compared = {"decontaminate": {"files": [str(tmp_path / "native" / "rows.jsonl")]}}
        (tmp_path / "native" / "rows.jsonl").write_text('{"a": "b"}\n', encoding="utf-8")
        build(tmp_path / "compared", raw, layout="pretokenized", **compared, **KIMI)


def test_the_number_of_rows_is_what_was_expected(tmp_path: Path) -> None:
    source = {"files": [str(tmp_path / "rows.jsonl")], "format": "jsonl"}
    raw = [chat(user("a")), chat(user("b")), chat()]
    assert build(tmp_path, raw, source={**source, "expected_rows": 3}).ledger["in"] == 3
    with pytest.raises(GateError, match=r"seen: 3 rows\n  expected: 4; another release"):
        build(tmp_path, raw, source={**source, "expected_rows": 4})


def test_a_warning_stays_in_the_ledger(tmp_path: Path) -> None:
    built = build(tmp_path, [chat(), chat(), chat(user("a"))], gates={"on_fail": "warn"})
    assert len(built.rows) == 1
    assert "kept 1 of 3 rows (33% of those judged); skipped: 2 empty_conv" in built.ledger["warnings"][0]
    with pytest.raises(GateError, match="kept 0 of 1 rows"):
        build(tmp_path / "none", [chat()], gates={"on_fail": "warn", "min_kept_share": 0})


def test_the_ledger_says_where_the_rows_are_from(tmp_path: Path) -> None:
    ledger = build(tmp_path, [chat(user("a"), says("b"))], **KIMI).ledger
    assert ledger == {
        "dataset": "d",
        "stage": "prompts",
        "source": {
            "files": [
                {
                    "name": "rows.jsonl",
                    "bytes": (tmp_path / "rows.jsonl").stat().st_size,
                    "sha256": sha256_file(tmp_path / "rows.jsonl"),
                }
            ]
        },
        **{"in": 1, "kept": 1, "skipped": {}, "notes": {}, "warnings": []},
        **{"licence": "mit", "layout": "messages", "native_model": KIMI["native_model"]},
    }


TEXTS = st.sampled_from(["", " ", "a", "a ", "b", "c\n", "d", "e", "\u2028"])
TURNS = st.tuples(st.sampled_from(["user", "assistant", "system", "tool", "narrator"]), TEXTS)
CHATS = st.lists(TURNS, max_size=4).map(lambda spoken: chat(*({"role": r, "content": t} for r, t in spoken)))


@settings(max_examples=40)
@given(
    raw=st.lists(CHATS, min_size=1, max_size=8),
    cap=st.none() | st.integers(1, 3),
    native=st.booleans(),
    near=st.sampled_from([None, {"threshold": 0.5, "words": 1}]),
)
def test_every_row_is_kept_or_skipped(
    tmp_path_factory: pytest.TempPathFactory,
    raw: list[Any],
    cap: int | None,
    native: bool,
    near: dict[str, Any] | None,
) -> None:
    folder = tmp_path_factory.mktemp("build")
    gates = {"min_kept_share": 0, "max_duplicate_share": 1, "max_empty_answer_share": 1}
    try:
        built = build(folder, raw, samples=cap, gates=gates, near_duplicates=near, **KIMI if native else {})
    except GateError:
        ledger = read_json(Built(folder).failed)
        assert ledger["kept"] == 0
    else:
        ledger = built.ledger
        assert len(built.rows) == ledger["kept"] <= (cap or len(raw))
        assert len(built.rejects) == sum(ledger["skipped"].values())
        assert len({row["id"] for row in built.rows}) == len(built.rows)
    assert ledger["in"] == len(raw) == ledger["kept"] + sum(ledger["skipped"].values())


@settings(max_examples=30)
@given(order=st.permutations(range(6)), cap=st.none() | st.integers(1, 6))
def test_the_order_of_the_rows_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], cap: int | None
) -> None:
    raw = [chat(user(f"question {number}"), says(f"answer {number}")) for number in range(6)]
    plain = build(tmp_path_factory.mktemp("plain"), raw, samples=cap, **KIMI)
    other = build(tmp_path_factory.mktemp("other"), [raw[number] for number in order], samples=cap, **KIMI)
    assert plain.out.read_bytes() == other.out.read_bytes()
    assert plain.ledger["skipped"] == other.ledger["skipped"]


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("datasets:\n  d:\n    licence: mit\n    layout: x\n    fields: {}\n", encoding="utf-8")
    monkeypatch.setenv("EYRIE_CONFIG_FILES", str(path))
    return path


@pytest.mark.usefixtures("config")
def test_the_wrong_layout_stops_with_what_was_seen(tmp_path: Path) -> None:
    spoken = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
    with pytest.raises(GateError) as refusal:
        build(tmp_path, [{"conversations": spoken, "source": "x"}] * 3)
    words = str(refusal.value)
    assert "rows.jsonl" in words
    assert "columns seen: conversations, source" in words
    assert "from=user 3, from=assistant 3" in words
    assert "kept 0 of 3 rows" in words
    assert "3 missing_column:role" in words
    assert "a list of {role, content}" in words
    assert "config.yaml:4 datasets.d.layout" in words


def test_a_parquet_files_own_columns_are_named(tmp_path: Path) -> None:
    made = entry([str(sample("swe_agent"))], "parquet", layout="messages")
    with pytest.raises(GateError) as refusal:
        build_files(tmp_path, made)
    assert "columns seen: eval_logs, exit_status, generated_patch, instance_id" in str(refusal.value)
    assert "missing_column:messages" in str(refusal.value)


def test_unknown_roles_stop_the_build(tmp_path: Path) -> None:
    turn = {"role": "laguna_s", "content": "b"}
    with pytest.raises(GateError, match="2 unknown_role:laguna_s"):
        build(tmp_path, [chat(user("a"), turn), chat(user("b"), turn), chat(user("c"))])


def test_a_refusal_leaves_only_the_counts_and_some_rows(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"ledger\.json\.failed\.json"):
        build(tmp_path, [chat(says("a"))] * 5 + [chat()])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["ledger.json.failed.json", "raw", "rows.jsonl"]
    document = read_json(tmp_path / "ledger.json.failed.json")
    assert document["skipped"] == {"empty_conversation": 1, "starts_with_assistant": 5}
    assert len(document["examples"]["starts_with_assistant"]) == 3
    assert document["examples"]["empty_conversation"][0]["row"] == chat()
    # The next build that passes takes it away.
    assert not build(tmp_path, [chat(user("a"))]).failed.exists()


def test_duplicates_and_the_cap_close_no_gate(tmp_path: Path) -> None:
    built = build(tmp_path, [chat(user("same"))] * 50 + [chat(user(str(n))) for n in range(50)], samples=1)
    assert built.ledger["kept"] == 1


@pytest.mark.usefixtures("config")
def test_a_layout_there_is_not_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"config\.yaml:4 datasets\.d\.layout: saw layout 'sharegp'.*sharegpt"
    ):
        build(tmp_path, [chat(user("a"))], layout="sharegp")


@pytest.mark.usefixtures("config")
def test_a_field_there_is_not_is_named(tmp_path: Path) -> None:
    words = (
        r"config\.yaml:5 datasets\.d\.fields\.question: saw 'question'; layout pairs has columns prompt, resp"
    )
    with pytest.raises(ConfigError, match=words):
        build(tmp_path, [{"q": "a"}], layout="pairs", fields={"question": "q"})
    with pytest.raises(
        ConfigError, match=r"config\.yaml:5 datasets\.d\.fields: layout pairs guesses no column"
    ):
        build(tmp_path, [{"prompt": "a"}], layout="pairs")


def test_a_raw_file_changed_by_hand_is_refused(tmp_path: Path) -> None:
    build(tmp_path, [chat(user("a"))])
    made = entry(["rows.jsonl"], "jsonl", layout="messages")
    (tmp_path / "raw" / "rows.jsonl").write_text(json.dumps(chat(user("b"))), encoding="utf-8")
    with pytest.raises(
        RecordError, match=r"rows\.jsonl: was changed since it was fetched.*delete .*source\.json"
    ):
        Prompts("d", made, tmp_path / "raw" / "source.json")
    (tmp_path / "raw" / "rows.jsonl").unlink()
    with pytest.raises(RecordError, match=r"rows\.jsonl: is missing"):
        Prompts("d", made, tmp_path / "raw" / "source.json")


# --- the commands -------------------------------------------------------------------------------------------


def command(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, f"scripts/{script}.py", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_commands_by_hand(tmp_path: Path) -> None:
    path = sample("openthoughts")
    made = entry([str(path)], path.suffix[1:], layout="sharegpt")
    source = tmp_path / "source.json"
    fetched = command(
        "fetch_raw", "--dataset", "d", "--settings", made.source.model_dump_json(), "--out", source
    )
    assert fetched.returncode == 0, fetched.stderr

    def prompts(settings: DatasetSettings) -> subprocess.CompletedProcess[str]:
        outputs = {
            "out": "prompts.jsonl",
            "ledger": "ledger.json",
            "rejects": "rejects.jsonl",
            "log": "log.txt",
        }
        files = [part for name, file in outputs.items() for part in (f"--{name}", tmp_path / file)]
        given = settings.model_dump_json()
        return command("build_prompts", "--dataset", "d", "--settings", given, "--raw", source, *files)

    done = prompts(made)
    assert done.returncode == 0, done.stderr
    assert "93 rows read, 91 kept; skipped: 2 empty_conversation" in (tmp_path / "log.txt").read_text()
    refused = prompts(made.model_copy(update={"layout": "messages"}))
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "kept 0 of 93 rows" in refused.stderr
