"""Files of a hub's dataset: splits, columns, and copies of a repository, all without a network."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fetch_raw
from eyrie.config import ConfigError, SourceSettings
from eyrie.copies import copy_columns
from eyrie.raw_files import rows
from eyrie.recipes import raw_files, source_settings
from eyrie.records import RecordError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# The second row lacks a key of the first, and a date is a string: what type inference would spoil.
CALLS = [
    {"messages": [{"role": "user", "content": "a", "arguments": {"x": 1}}], "when": "2024-01-01"},
    {"messages": [{"role": "user", "content": "b", "arguments": {"y": None}}], "when": "2024-01-02"},
]
CARD = """---
configs:
- config_name: code
  data_files:
  - {split: train_sft, path: code/train-*}
  - {split: test_sft, path: code/test-*}
- config_name: math
  data_files:
  - {split: train, path: math/*}
---
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of a dataset's repository: two configurations, parquet and compressed JSON lines."""
    root = tmp_path / "repository"
    for folder in ("code", "math", ".git"):
        (root / folder).mkdir(parents=True)
    (root / "README.md").write_text(CARD, encoding="utf-8")
    (root / ".git" / "config").write_text("", encoding="utf-8")
    for number in range(2):
        table = pa.table({"id": [number], "input": [f"q{number}"], "logs": ["long " * 1000]})
        pq.write_table(table, root / "code" / f"train-{number:05d}-of-00002.parquet")
    pq.write_table(table, root / "code" / "test-00000-of-00001.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in CALLS)
    (root / "math" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return root


def source(root: Path, **changes: Any) -> SourceSettings:
    return SourceSettings.model_validate({"hub_id": str(root), "format": "parquet"} | changes)


def names(paths: list[Path], folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]


def test_a_split_names_its_files(repository: Path, tmp_path: Path) -> None:
    made = source(repository, config="code", split="train_sft")
    found = fetch_raw.fetch("d", made, tmp_path / "raw")
    assert names(found, tmp_path / "raw") == [
        f"repository/code/train-0000{number}-of-00002.parquet" for number in range(2)
    ]
    assert [path.read_bytes() for path in found] == [
        path.read_bytes() for path in sorted((repository / "code").glob("train*"))
    ]


def test_rows_of_a_split_are_as_they_stand_in_the_file(repository: Path, tmp_path: Path) -> None:
    made = source(repository, config="math", split="train", format="jsonl")
    found = fetch_raw.fetch("d", made, tmp_path / "raw")
    assert [row for _, row in rows(found, "jsonl")] == CALLS


def test_columns_are_taken_alone_with_their_types(repository: Path, tmp_path: Path) -> None:
    made = source(repository, config="code", split="train_sft", columns=["input", "id"])
    found = fetch_raw.fetch("d", made, tmp_path / "raw")
    assert [row for _, row in rows(found, "parquet")] == [{"input": f"q{n}", "id": n} for n in range(2)]
    assert pq.read_schema(found[0]) == pa.schema({"input": pa.string(), "id": pa.int64()})
    with pytest.raises(RecordError, match=r"saw no column prompt of source\.columns, but id, input, logs"):
        fetch_raw.fetch("d", source(repository, files=["code/*"], columns=["prompt"]), tmp_path / "raw")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with (
        (tmp_path / "a.parquet").open("rb") as file,
        pytest.raises(RecordError, match=r"a\.parquet.*damaged"),
    ):
        copy_columns("a.parquet", file, ["x"], tmp_path / "b.parquet")
    assert not (tmp_path / "b.parquet").exists()


def test_files_of_a_copy_can_be_named(repository: Path, tmp_path: Path) -> None:
    found = fetch_raw.fetch("d", source(repository, files=["code/test-*"]), tmp_path / "raw")
    assert names(found, tmp_path / "raw") == ["repository/code/test-00000-of-00001.parquet"]
    with pytest.raises(ConfigError, match=r"source\.files: .* holds no file that 'physics/\*' names"):
        fetch_raw.fetch("d", source(repository, files=["physics/*"]), tmp_path / "raw")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": "code", "split": "train"}, r"source\.split: saw 'train'; .* splits train_sft, test_sft"),
        ({"config": "physics", "split": "train"}, r"source\.config: .*Available: \['code', 'math'\]"),
        ({"split": "train"}, r"source\.config: .*Config name is missing.*\['code', 'math'\]"),
    ],
)
def test_a_split_or_configuration_there_is_not(
    repository: Path, tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        fetch_raw.fetch("d", source(repository, **changes), tmp_path / "raw")


def test_a_dataset_that_is_a_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "chats.py").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="scripts are no longer supported"):
        fetch_raw.fetch("d", source(tmp_path / "chats", split="train"), tmp_path / "raw")


def test_a_copy_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source\.hub_id: .*absent is no folder; expected OWNER/NAME"):
        fetch_raw.fetch("d", source(tmp_path / "absent", split="train"), tmp_path / "raw")


@pytest.mark.parametrize("columns", [None, ["input"]])
def test_without_a_network_a_brought_repository_has_its_splits(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str] | None
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    split = {"config": "code", "split": "train_sft", "columns": columns}
    made = source(Path("someone/chats"), revision=COMMIT, **split)
    with pytest.raises(ConfigError, match=rf"cannot be reached.*\n.*\n.*--revision {COMMIT} --local-dir"):
        fetch_raw.fetch("d", made, tmp_path / "raw")
    (tmp_path / "raw").mkdir()
    repository.rename(tmp_path / "raw" / COMMIT)
    found = fetch_raw.fetch("d", made, tmp_path / "raw")
    assert [path.name for path in found] == [f"train-0000{n}-of-00002.parquet" for n in range(2)]


def test_what_makes_fetched_files_stale(repository: Path) -> None:
    made = source(repository, config="code", split="train_sft")
    assert len(raw_files(made)) == 5
    assert raw_files(source(repository, files=["math/*"])) == [str(repository / "math" / "a.jsonl.gz")]
    assert raw_files(source(Path("someone/chats"), split="train")) == []
    counted = source(repository, config="code", split="train_sft", expected_rows=2)
    assert source_settings(made) == source_settings(counted)
    assert source_settings(made) != source_settings(source(repository, config="math", split="train"))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"files": []}, "expected either files, or hub_id and split"),
        ({"files": ["a"], "split": "train", "hub_id": "a/b"}, "expected either files, or hub_id and split"),
        ({"split": "train"}, "split goes with hub_id"),
        ({"files": ["a"], "hub_id": "a/b", "config": "code"}, "config goes with split"),
        ({"files": ["a"], "columns": ["x"]}, "columns goes with hub_id and format: parquet"),
        ({"files": ["a"], "hub_id": "./copy", "revision": COMMIT}, "revision goes with a hub_id on the hub"),
    ],
)
def test_sources_that_contradict_themselves(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SourceSettings.model_validate({"format": "jsonl"} | entry)
