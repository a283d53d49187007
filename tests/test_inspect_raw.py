"""A stranger's file is described, and its entry builds; an ambiguous one is left to its owner."""

from __future__ import annotations

import glob
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fetch_raw
from eyrie.config import DatasetSettings
from eyrie.detection import detect_format, detect_layout
from eyrie.inspection import Inspection, InspectionError
from eyrie.prompts import Prompts
from eyrie.records import RecordError, read_json, sha256_file, write_json

ROOT = Path(__file__).resolve().parents[1]
REAL = Path(os.environ.get("EYRIE_REAL_ROWS", ROOT.parent / "shared" / "real"))

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SPOKEN = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def entry_of(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the entry in what the command prints, as a reader of YAML sees it."""
    _, _, entry = text.partition("entry for the configuration:")
    ((name, made),) = yaml.safe_load(entry)["datasets"].items()
    return name, made


def kept_by(made: dict[str, Any], folder: Path) -> int:
    """Build the prompts of an entry; how many rows are kept."""
    settings = DatasetSettings.model_validate(made)
    files = [
        {
            "name": str(Path(glob.glob(name)[0]).resolve()),
            "bytes": 0,
            "sha256": sha256_file(Path(glob.glob(name)[0])),
        }
        for name in settings.source.files
    ]
    write_json(folder / "source.json", {"files": files})
    out, ledger, rejects = (folder / name for name in ("out.jsonl", "ledger.json", "rejects.jsonl"))
    return Prompts("inspected", settings, folder / "source.json").write(out, ledger, rejects).kept


def inspected(path: Path, rows: int = 1_000) -> str:
    inspection = Inspection(path, detect_format(path), rows)
    return f"{inspection.report()}\n{inspection.entry()}"


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


# --- the samples --------------------------------------------------------------------------------------------

SAMPLES = {
    "deepswe_kimi.jsonl": "messages",
    "kimi_native.jsonl": "reasoning_pairs",
    "glaive.json": "chat_string",
    "opencodeinstruct.parquet": "pairs",
    "magicoder.jsonl": "pairs",
    "mixture_of_thoughts.parquet": "messages",
    "openthoughts.parquet": "sharegpt",
    "ultrachat.parquet": "messages",
    "sharegpt.json": "sharegpt_chunks",
    "swe_agent.parquet": "trajectory",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_entry_of_a_sample_builds_what_is_expected(name: str, tmp_path: Path) -> None:
    dataset, made = entry_of(inspected(ROOT / "samples" / name))
    assert dataset == name.split(".")[0]
    assert made["layout"] == SAMPLES[name]
    expected = read_json(ROOT / "samples" / "expected.json")[dataset]
    # As prompts, a native dataset keeps those whose answer is blank as well.
    unanswered = expected["skipped"].get("no_supervised_text", 0)
    assert expected["usable"] <= kept_by(made, tmp_path) <= expected["usable"] + unanswered


def test_the_command_prints_figures_and_the_entry() -> None:
    command = [sys.executable, "scripts/inspect_raw.py", "samples/swe_agent.parquet", "--rows", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "parquet, the first 50 rows" in done.stdout
    assert "roles seen in the first 1000 rows: role=" in done.stdout
    assert "first role as trajectory reads it: system" in done.stdout
    assert "last role as trajectory reads it: " in done.stdout
    assert "how sure: " in done.stdout
    assert entry_of(done.stdout)[1]["layout"] == "trajectory"


# --- real files ---------------------------------------------------------------------------------------------

REAL_FILES = [
    *("alpaca/pytorch__torchtune__alpaca_tiny.json", "csv/modelscope__ms-swift__alpaca.csv"),
    *("glaive_raw/smg-project__bellwether__glaive_v2_rows_25475_107105.json",),
    *("harmony/openai__harmony__test_preserve_cot.txt",),
    *("json_string/alibaba__ROLL__math_benchmarks.first30.jsonl",),
    *("list_of_strings/Tencent__AngelSlim__gsm8k_question.jsonl",),
    *("message_tree/LAION-AI__Open-Assistant__realistic_seed_data.json",),
    *("messages/InternLM__xtuner__openai_sft.jsonl", "multimodal/hiyouga__LlamaFactory__mllm_demo.json"),
    *("parquet/kidding-404__nano-verl__test.parquet",),
    *("preference/hiyouga__LlamaFactory__v1_dpo_demo.jsonl",),
    *("pretokenized/axolotl-ai-cloud__axolotl__conversation.tokenized.json",),
    *("request_logs/allenai__open-instruct__openai_batch_requests.jsonl",),
    *("sharegpt/lm-sys__FastChat__dummy_conversation.json",),
    *("tools_reasoning/hiyouga__LlamaFactory__reason_tool_use_demo_50.jsonl",),
    *("trajectory_sweagent/SWE-agent__SWE-agent__function_calling_simple.traj",),
]


@pytest.mark.real
@pytest.mark.skipif(not (REAL / "INDEX.tsv").exists(), reason="set EYRIE_REAL_ROWS to the real rows")
@pytest.mark.parametrize("name", REAL_FILES)
def test_the_entry_of_a_real_file_builds(name: str, tmp_path: Path) -> None:
    assert kept_by(entry_of(inspected(REAL / name))[1], tmp_path) > 0


# --- what is found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "layout", "fields"),
    [
        ({"messages": HELLO}, "messages", {}),
        ({"messages": json.dumps(HELLO)}, "messages", {}),
        ({"conversations": HELLO}, "messages", {}),
        ({"history": HELLO}, "messages", {"messages": "history"}),
        ({"data": {"chat": HELLO}}, "messages", {"messages": "data.chat"}),
        (HELLO, "messages", {}),
        ({"conversations": SPOKEN}, "sharegpt", {}),
        ({"id": "a_0", "conversations": SPOKEN}, "sharegpt_chunks", {}),
        ({"conversations": [SPOKEN[0], HELLO[1]]}, "mixed_turns", {}),
        ({"messages": [HELLO[0], {"role": "assistant_final", "content": "x"}]}, "harmony_messages", {}),
        ({"chosen": HELLO, "rejected": HELLO}, "preference", {}),
        ({"instruction": "Hi", "input": "there", "output": "x"}, "alpaca", {}),
        ({"input": "Hi", "output": "x"}, "pairs", {"prompt": "input", "response": "output"}),
        ({"problem": "Hi", "thinking": "", "solution": "x"}, "reasoning_pairs", {"response": "solution"}),
        ({"query": "Hi", "response": "x", "history": []}, "history_pairs", {}),
        ({"prompt": HELLO[:1], "completion": HELLO[1:]}, "prompt_messages", {}),
        ({"data": ["Hi", "Hello"]}, "string_list", {}),
        ({"turns": ["Hi", "Ho"]}, "user_turns", {}),
        ({"conversation": HELLO[:1], "generated_message": HELLO[1]}, "generated_message", {}),
        ({"conversation": [{"human": "Hi", "assistant": "Hello"}]}, "turn_pairs", {}),
        ({"request": {"messages": HELLO}, "response": None}, "request_log", {}),
        ({"body": {"messages": HELLO}}, "request_log", {"request": "body"}),
        ({"prompt": {"role": "prompter", "text": "Hi", "replies": []}}, "message_tree", {}),
        ({"text": "Hi", "role": "prompter", "parent_id": None}, "message_rows", {}),
        ({"text": "Human: Hi\nAssistant: Hello"}, "dialogue_text", {}),
        ({"text": "[INST] Hi [/INST] Hello"}, "inst_text", {}),
        ({"text": "### Instruction:\nHi\n### Response:\nHello"}, "instruction_text", {}),
        ({"text": "<|im_start|>user\nHi<|im_end|>"}, "chatml_text", {}),
        ("<|start|>user<|message|>Hi<|end|>", "harmony_text", {}),
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "pretokenized", {}),
    ],
)
def test_the_layout_of_a_row_is_found(row: Any, layout: str, fields: dict[str, str]) -> None:
    found = detect_layout([row]).found
    assert found is not None
    assert (found.layout, found.fields) == (layout, fields)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": HELLO, "conversations": [{"from": "human", "value": "Something else"}]},
        {"question": "Hi", "problem": "Something else", "answer": "x"},
        {"instruction": "Hi", "query": "Something else"},
        {"data": ["Hi", "Hello"], "messages": [{"role": "user", "content": "Something else"}]},
    ],
)
def test_two_columns_with_different_questions_are_left_to_a_person(row: Any, tmp_path: Path) -> None:
    with pytest.raises(InspectionError) as refusal:
        inspected(lines(tmp_path / "r.jsonl", row, row))
    assert "more than one layout fits" in str(refusal.value)
    assert "Something else" in str(refusal.value) and "Hi" in str(refusal.value)


def test_two_columns_with_the_same_questions_are_no_matter(tmp_path: Path) -> None:
    row = {"prompt": " Hi\n", "messages": HELLO}
    assert entry_of(inspected(lines(tmp_path / "r.jsonl", row)))[1]["layout"] == "messages"


def test_an_ambiguous_file_ends_the_command_with_status_1(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl", {"question": "Hi", "problem": "Ho"})
    command = [sys.executable, "scripts/inspect_raw.py", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pairs (reads problem, prompt: problem)" in done.stderr
    assert "entry for" not in done.stdout and "Traceback" not in done.stderr


def test_a_file_that_no_layout_reads_is_refused_with_what_was_tried(tmp_path: Path) -> None:
    unknown = {"messages": [{"role": "laguna_s", "content": "Hi"}]}
    with pytest.raises(
        InspectionError, match=r"no layout reads its rows\n  messages .*unknown_role:laguna_s 1"
    ):
        inspected(lines(tmp_path / "r.jsonl", unknown))
    with pytest.raises(InspectionError, match="no layout reads its rows\n  expected"):
        inspected(lines(tmp_path / "r.jsonl", {"tokens": ["foo"], "labels": [1]}))
    with pytest.raises(RecordError, match="git lfs pull"):
        pointer = tmp_path / "pointer.jsonl"
        pointer.write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
        inspected(pointer)


def test_rows_with_pictures_alone_are_read_for_their_text(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl", *({"question": f"Who {n}?", "image": "a.png"} for n in range(3)))
    made = entry_of(inspected(path))[1]
    assert (made["layout"], made["media"]) == ("pairs", "text_only")
    assert kept_by(made, tmp_path) == 3


def test_gates_that_the_rows_cannot_pass_are_part_of_the_entry(tmp_path: Path) -> None:
    replies = [{"text": "x", "role": "assistant", "parent_id": "m"}] * 9
    path = lines(tmp_path / "r.jsonl", {"text": "Hi", "role": "prompter", "parent_id": None}, *replies)
    made = entry_of(inspected(path))[1]
    assert made["gates"] == {"min_kept_share": 0.05}
    assert kept_by(made, tmp_path) == 1


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "9 [lives].jsonl", {"messages": HELLO})
    path.write_text(path.read_text() + '{"a": NaN}\n')
    text = inspected(path)
    assert "cannot be read: 1 bad_json:not_a_number" in text
    assert entry_of(text)[0] == "d_9_lives"


def test_an_entry_names_its_file_and_no_target_of_the_build(tmp_path: Path) -> None:
    path = lines(tmp_path / "[a] b.jsonl", {"messages": HELLO})
    _, made = entry_of(inspected(path))
    fetched = fetch_raw.fetch("d", DatasetSettings.model_validate(made).source, tmp_path / "raw")
    assert [file.name for file in fetched] == ["[a] b.jsonl"]
    assert entry_of(inspected(lines(tmp_path / "prompts.jsonl", {"messages": HELLO})))[0] == "d_prompts"


def test_figures_of_the_columns(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "r.jsonl", {"question": "a" * 100, "n": None}, {"question": "b", "n": 3}, {"question": " "}
    )
    report = Inspection(path, "jsonl", 10).report()
    assert "question        2/3  text                      1 - 50 - 100" in report
    assert "n               1/3  int" in report
    assert f'"question": "{"a" * 48}... (100)"' in report


# --- formats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("r.jsonl", b'{"a":1}\n', "jsonl"),
        ("r.json", b'{"a":1}\n{"a":2}\n', "jsonl"),
        ("r.json", b'{"a":1}\n', "json"),
        ("r.json", b'[\n{"a":1}]', "json"),
        ("r.jsonl", b'[{"a":1}]\n', "jsonl"),
        ("r.json", b'[{"a":1}]\n[{"a":2}]\n', "jsonl"),
        ("r.traj", b'{\n"a":1}', "json"),
        ("r.json.gz", gzip.compress(b'{"a":1}\n{"a":2}\n', mtime=0), "jsonl"),
        ("r.csv", b"a,b\n1,2\n", "csv"),
        ("r.CSV.gz", gzip.compress(b"a,b\n1,2\n", mtime=0), "csv"),
        ("r.txt", b"<|start|>user", "text"),
        ("r.x", b"PAR1", "parquet"),
    ],
)
def test_a_format_is_known_by_the_first_bytes(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert detect_format(path) == expected
