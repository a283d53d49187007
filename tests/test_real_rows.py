"""The layouts on real rows of public repositories, against counts that a careful reader finds.

The rows are no part of this project: set EYRIE_REAL_ROWS to their folder, or these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyrie.config import DatasetSettings
from eyrie.gates import GateError
from eyrie.layouts import load_layout
from eyrie.layouts.base import Conversation, SkipRow
from eyrie.prompts import Prompts
from eyrie.questions import asked, check_conversation
from eyrie.raw_files import Format, RawError, rows
from eyrie.records import RecordError, sha256_file, write_json

ROOT = Path(os.environ.get("EYRIE_REAL_ROWS", Path(__file__).parents[2] / "shared" / "real"))

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (ROOT / "INDEX.tsv").exists(), reason="set EYRIE_REAL_ROWS to the real rows"),
]

# How each file is read: layout and, where a column bears another name, fields. A folder's entry serves all
# of its files that have none of their own.
LAYOUTS: dict[str, tuple[str, dict[str, str]]] = {
    "sharegpt": ("sharegpt", {}),
    "sharegpt/modelscope__ms-swift__sharegpt_pairs.jsonl": ("turn_pairs", {}),
    "glaive_sharegpt": ("sharegpt", {}),
    "glaive_raw": ("chat_string", {}),
    "alpaca": ("alpaca", {}),
    "messages": ("messages", {}),
    "conversations_role": ("messages", {}),
    "tools_reasoning": ("messages", {}),
    "messages_function_tags": ("messages", {}),
    "json_string": ("messages", {}),
    "mixture_of_thoughts": ("messages", {}),
    "trajectory_nebius": ("trajectory", {}),
    "trajectory_sweagent": ("messages", {"messages": "history"}),
    "request_logs/allenai__open-instruct__openai_batch_requests.jsonl": (
        "messages",
        {"messages": "body.messages"},
    ),
    "request_logs/alibaba__ROLL__swe_bench_verified_example.jsonl": ("pairs", {"prompt": "prompt"}),
    "preference": ("preference", {}),
    "preference/hiyouga__LlamaFactory__v1_dpo_demo.jsonl": (
        "preference",
        {"chosen": "chosen_messages", "rejected": "rejected_messages"},
    ),
    "pairs": ("pairs", {"prompt": "prompt", "response": "response"}),
    "pairs/huilong-chen__LLMhub__magicoder_oss_instruct_row.jsonl": (
        "pairs",
        {"prompt": "problem", "response": "solution"},
    ),
    "pairs/huilong-chen__LLMhub__evol_instruct_code_row.jsonl": (
        "pairs",
        {"prompt": "instruction", "response": "output"},
    ),
    "pairs/pytorch__torchtune__instruct_tiny.json": (
        "pairs",
        {"prompt": "instruction", "response": "response"},
    ),
    "pairs/oumi-ai__oumi__judge_input.jsonl": ("pairs", {"prompt": "request", "response": "response"}),
    "parquet": ("pairs", {"prompt": "question", "response": "answer"}),
    "multimodal": ("messages", {}),
    "multimodal/Tencent__AngelSlim__multimodal_fake_data.json": (
        "pairs",
        {"prompt": "question", "response": "answer"},
    ),
    "multimodal/haotian-liu__LLaVA__qa90_questions.jsonl": ("pairs", {"prompt": "text"}),
    "multimodal/modelscope__ms-swift__multi_modal_1.jsonl": ("history_pairs", {}),
    "pretokenized": ("pretokenized", {}),
    "csv": ("alpaca", {}),
    "csv/huilong-chen__LLMhub__chinese_language_and_literature_dev.csv": (
        "pairs",
        {"prompt": "question", "response": "answer"},
    ),
    "list_of_strings/thunlp__UltraChat__ultrachat_readme_row.jsonl": ("string_list", {}),
    "list_of_strings/Tencent__AngelSlim__gsm8k_question.jsonl": ("user_turns", {}),
    "message_tree": ("message_rows", {"parent_id": "parent_message_id"}),
    "harmony": ("harmony_text", {}),
    "containers/huggingface__datasets__test_file.json.gz": ("messages", {}),
}
# Files that hold no rows: what becomes of them is tested below, one by one.
NO_ROWS = {"containers/allenai__open-instruct__LFS_POINTER_sft_sample.jsonl"}
# Where the index is mistaken: the count it should have, and why.
CORRECTED: dict[str, dict[str, int]] = {
    # Its third row has no picture: "EEEEE" after a history of plain words. The index counts the file, not
    # its rows, though its own rule is about rows.
    "multimodal/modelscope__ms-swift__multi_modal_1.jsonl": {
        **{"usable_prompts": 1, "distinct_prompts": 1, "usable_conversations": 1}
    },
    # Decompressed, the file has ten lines; four is a miscount.
    "containers/huggingface__datasets__test_file.json.gz": {"rows": 10},
    # Both end on an open turn of the assistant, which an engine was to fill, but the first has an answer
    # before it; by the index's own rule (an assistant turn, the user first) it is a conversation.
    "harmony/openai__harmony__test_preserve_cot.txt": {"usable_conversations": 1},
}


def unescaped(cell: str) -> str:
    return cell.replace("\\\\", "\0").replace("\\n", "\n").replace("\\t", "\t").replace("\0", "\\")


def index() -> list[dict[str, str]]:
    path = ROOT / "INDEX.tsv"
    if not path.exists():
        return []
    names, *lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    cells = [[unescaped(cell) for cell in line.split("\t")] for line in lines]
    return [dict(zip(names.split("\t"), line, strict=True)) for line in cells]


def how(path: str) -> tuple[str, dict[str, str]] | None:
    return LAYOUTS.get(path, LAYOUTS.get(path.partition("/")[0]))


def count(entry: dict[str, str], name: str) -> int:
    return CORRECTED.get(entry["path"], {}).get(name, int(entry[name]))


def container(entry: dict[str, str]) -> Format:
    return entry["container"].removesuffix(".gz")  # type: ignore[return-value]


ROWS = [entry for entry in index() if entry["path"] not in NO_ROWS and entry["container"] != "json-edge"]
USABLE = [entry for entry in ROWS if count(entry, "usable_prompts") > 0]
TOKENS = [entry for entry in ROWS if entry["schema"] == "pretokenized"]
REFUSED = [entry for entry in ROWS if entry not in USABLE and entry not in TOKENS]


def name_of(entry: dict[str, str]) -> str:
    return entry["path"]


def conversations(entry: dict[str, str]) -> Iterator[Conversation | None]:
    """Each record as a conversation, or None where the layout or the rules skip it."""
    layout_name, fields = how(entry["path"]) or ("", {})
    layout = load_layout(layout_name)
    for _, raw in rows([ROOT / entry["path"]], container(entry)):
        assert not isinstance(raw, RawError), raw
        try:
            conversation = layout.read(raw, fields)
            check_conversation(conversation.messages, native=False)
        except SkipRow:
            yield None
        else:
            yield conversation


@pytest.mark.parametrize("entry", USABLE, ids=name_of)
def test_prompts_are_those_of_a_careful_reader(entry: dict[str, str]) -> None:
    found = list(conversations(entry))
    prompts = [asked(made.messages, with_system=False)[0]["content"] for made in found if made is not None]

    assert len(found) == count(entry, "rows")
    assert len(prompts) == count(entry, "usable_prompts")
    assert len({prompt.strip() for prompt in prompts}) == count(entry, "distinct_prompts")
    assert prompts[0].startswith(entry["first_prompt_60"])


@pytest.mark.parametrize("entry", USABLE, ids=name_of)
def test_conversations_are_those_of_a_careful_reader(entry: dict[str, str]) -> None:
    def complete(messages: list[dict[str, Any]]) -> bool:
        says_something = [bool(made["content"].strip() or made.get("tool_calls")) for made in messages]
        return all(says_something) and any(made["role"] == "assistant" for made in messages)

    found = [made for made in conversations(entry) if made is not None and complete(made.messages)]

    assert len(found) == count(entry, "usable_conversations")


@pytest.mark.parametrize("entry", TOKENS, ids=name_of)
def test_tokens_are_as_many_as_a_careful_reader_finds(entry: dict[str, str]) -> None:
    (_, raw), *more = rows([ROOT / entry["path"]], container(entry))
    tokens = load_layout("pretokenized").read(raw, {}).tokens
    assert more == [] and tokens is not None
    assert (len(tokens.input_ids), sum(tokens.loss_mask)) == (1970, 1798)


def test_every_file_is_read_or_refused_by_a_test() -> None:
    assert all(how(entry["path"]) is not None for entry in ROWS)
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/*")}
    assert files == {entry["path"] for entry in index()}


@pytest.mark.parametrize("entry", REFUSED, ids=name_of)
def test_what_holds_no_prompt_is_refused_with_what_was_seen(entry: dict[str, str], tmp_path: Path) -> None:
    layout, fields = how(entry["path"]) or ("", {})
    path = ROOT / entry["path"]
    settings = DatasetSettings.model_validate(
        {
            "source": {"files": [str(path)], "format": container(entry)},
            **{"licence": "unknown", "kind": "prompts", "layout": layout, "fields": fields},
        }
    )
    write_json(
        tmp_path / "source.json", {"files": [{"name": str(path), "bytes": 0, "sha256": sha256_file(path)}]}
    )

    with pytest.raises(GateError) as refusal:
        Prompts("real", settings, tmp_path / "source.json").write(
            tmp_path / "out.jsonl", tmp_path / "ledger.json", tmp_path / "rejects.jsonl"
        )

    assert f"kept 0 of {count(entry, 'rows')} rows" in str(refusal.value)
    assert path.name in str(refusal.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_pointer_in_place_of_a_file_is_named() -> None:
    path = ROOT / "containers" / "allenai__open-instruct__LFS_POINTER_sft_sample.jsonl"
    with pytest.raises(RecordError, match="git lfs pull"):
        list(rows([path], "jsonl"))


@pytest.mark.parametrize(
    "name",
    [
        "n_structure_incomplete_UTF8_BOM",
        "i_string_utf16BE_no_BOM",
        "i_string_1st_surrogate_but_2nd_missing",
        "i_object_key_lone_2nd_surrogate",
        "i_string_truncated-utf-8",
        "n_number_NaN",
        "y_object_duplicated_key",
        "n_object_trailing_comma",
        "n_string_unescaped_newline",
        "n_structure_unclosed_array_partial_null",
    ],
)
@pytest.mark.parametrize("file_format", ["json", "jsonl"])
def test_text_that_is_not_strict_json_gives_no_row(name: str, file_format: Any) -> None:
    path = ROOT / "json_edge" / f"nst__JSONTestSuite__{name}.json"
    try:
        values = [value for _, value in rows([path], file_format)]
    except RecordError:
        return
    if name == "n_structure_unclosed_array_partial_null":
        values = values[-1:]
    assert values and all(isinstance(value, RawError) for value in values)


@pytest.mark.parametrize("name", ["y_string_u+2028_line_sep", "y_string_null_escape"])
@pytest.mark.parametrize("file_format", ["json", "jsonl"])
def test_unusual_characters_are_one_record(name: str, file_format: Any) -> None:
    path = ROOT / "json_edge" / f"nst__JSONTestSuite__{name}.json"
    values = [value for _, value in rows([path], file_format)]
    assert len(values) == 1 and not isinstance(values[0], RawError)
