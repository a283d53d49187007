"""Raw files of every kind, sound, damaged and mistaken; and how they are fetched."""

from __future__ import annotations

import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fetch_raw
from eyrie import json_items, raw_files
from eyrie.config import ConfigError, SourceSettings
from eyrie.raw_files import RawError, rows
from eyrie.records import RecordError, read_json

COMMIT = "0123456789abcdef0123456789abcdef01234567"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def values(path: Path, file_format: Any, columns: set[str] | None = None) -> list[Any]:
    return [value for _, value in rows([path], file_format, columns)]


def written(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# --- JSON lines ---------------------------------------------------------------------------------------------


def test_lines_are_rows_and_their_numbers_are_their_places(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a":"x\xe2\x80\xa8y"}\n\n  \n{"a":"0012"}\r\n["bare"]'
    path = written(tmp_path / "r.jsonl", data)
    assert list(rows([path], "jsonl")) == [
        *[("r.jsonl:1", {"a": "x\u2028y"}), ("r.jsonl:4", {"a": "0012"}), ("r.jsonl:5", ["bare"])]
    ]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"a":NaN}', "not_a_number"),
        (b'{"a":[-Infinity]}', "not_a_number"),
        (b'{"a":1,"a":2}', "duplicate_key"),
        (b'{"a":"\\ud83d"}', "lone_surrogate"),
        (b'{"\\uDc00":1}', "lone_surrogate"),
        (b'{"a":"\xff"}', "not_utf8"),
        (b'{"a":"\xed\xa0\xbd"}', "not_utf8"),
        (b'{"a":', "syntax"),
        (b"{'a':1}", "syntax"),
        (b'{"a":1}{"a":2}', "syntax"),
        (b"[" * 100_000, "too_deep"),
    ],
)
def test_a_line_that_is_no_json_is_counted_and_the_rest_read(tmp_path: Path, line: bytes, kind: str) -> None:
    path = written(tmp_path / "r.jsonl", b'{"a":0}\n' + line + b'\n{"a":3}\n')
    first, broken, last = values(path, "jsonl")
    assert (first, last) == ({"a": 0}, {"a": 3})
    assert isinstance(broken, RawError)
    assert broken.reason == f"bad_json:{kind}"
    assert broken.text == line.decode(errors="replace")


def test_an_escaped_pair_is_text_and_so_is_an_escaped_backslash(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", '{"a":"\\ud83d\\ude00"}\n{"a":"\\\\ud83d"}\n')
    assert values(path, "jsonl") == [{"a": "\U0001f600"}, {"a": "\\ud83d"}]


def test_a_last_line_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", '{"a":1}\n{"a":"tw')
    (_, whole), (place, cut) = rows([path], "jsonl")
    assert (whole, place, cut.reason, cut.text) == (
        *({"a": 1}, "r.jsonl:2", "bad_json:truncated_last_line", '{"a":"tw'),
    )


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_that_is_too_long_is_counted_and_never_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(raw_files, "LONGEST_RECORD", 2_000)
    long = json.dumps({"a": "x" * 5_000})
    fits = json.dumps({"a": "y" * (2_000 - len('{"a": ""}') - 1)})
    first, broken, *rest = values(written(tmp_path / "r.jsonl", f"{fits}\n{long}\n{fits}{end}"), "jsonl")
    assert first == rest[0] == json.loads(fits)
    assert broken == RawError(
        "bad_json:long_line", "5010 bytes in one line; at most 2000 are read", long[:1_000]
    )


def test_lines_keep_their_places_however_many_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'{{"a":{n}}}\n' + ("" if n % 3 else "\n") for n in range(50)]
    path = written(tmp_path / "r.jsonl", "".join(lines))
    found = []
    for size in (1, 20, 1 << 16):
        monkeypatch.setattr(raw_files, "_LINES_AT_ONCE", size)
        found.append(list(rows([path], "jsonl")))
    assert found[0] == found[1] == found[2]
    assert [value["a"] for _, value in found[0]] == list(range(50))
    assert [place for place, _ in found[0][:4]] == ["r.jsonl:1", "r.jsonl:3", "r.jsonl:4", "r.jsonl:5"]


@pytest.mark.parametrize("text", ['[\n{"a":1},\n{"a":2}\n]', '[{"a":1},\n{"a":2}]', '{\n  "a": 1\n}'])
def test_a_document_taken_for_lines_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecordError, match=r"r\.json: begins like one JSON document .*change it to json"):
        values(written(tmp_path / "r.json", text), "jsonl")


# --- a JSON array -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 20])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(JSON, max_size=5), indent=st.sampled_from([None, 1]), escaped=st.booleans())
def test_an_array_is_its_items_whatever_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, items: list[Any], indent: Any, escaped: bool
) -> None:
    monkeypatch.setattr(json_items, "_PIECE", piece)
    text = json.dumps(items, indent=indent, ensure_ascii=escaped)
    found = list(rows([written(tmp_path / "r.json", "\ufeff" + text + "\n")], "json"))
    assert [value for _, value in found] == items
    assert [place for place, _ in found] == [f"r.json[{number}]" for number in range(len(items))]


def test_one_object_is_one_row(tmp_path: Path) -> None:
    assert values(written(tmp_path / "r.json", '\n{"a": [1]}\n'), "json") == [{"a": [1]}]


def test_an_item_against_the_rules_is_counted_and_the_rest_read(tmp_path: Path) -> None:
    path = written(tmp_path / "r.json", '[{"a": NaN}, {"a": 1, "a": 2}, {"a": "\\udc00"}, {"a": 3}]')
    *broken, last = values(path, "json")
    assert all(isinstance(value, RawError) for value in broken) and len(broken) == 3
    assert last == {"a": 3}


@pytest.mark.parametrize(
    "text",
    [
        *[
            '[{"a":1}',
            '[{"a":1},',
            '[{"a":1},]',
            '[{"a":1} {"a":2}]',
            '[{"a":1}]]',
            "[1,2",
            "[",
            '[{"a":1,}]',
        ],
        *['{"a":1}\n{"a":2}\n', '[{"a":"\n"}]', "[1,,2]", "nothing"],
    ],
)
def test_an_array_that_is_none_stops_the_build(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecordError, match=r"r\.json: expected one JSON array.*source\.format: jsonl"):
        values(written(tmp_path / "r.json", text), "json")


def test_bytes_that_are_no_text_cost_their_item_alone(tmp_path: Path) -> None:
    broken, whole = values(written(tmp_path / "r.json", b'["caf\xe9", "caf\xc3\xa9"]'), "json")
    assert (broken.reason, broken.message) == ("bad_json:not_utf8", "byte 0xe9 is not UTF-8")
    assert broken.text == '"caf\ufffd"'
    assert whole == "caf\u00e9"


# --- CSV ----------------------------------------------------------------------------------------------------


def test_cells_are_text_and_empty_ones_are_null(tmp_path: Path) -> None:
    data = '\ufeffid,asked,answer\r\n0012,"a, ""b""\nc",\r\n\r\n3.30,NaN,true\r\n'
    assert list(rows([written(tmp_path / "r.csv", data)], "csv")) == [
        ("r.csv:2", {"id": "0012", "asked": 'a, "b"\nc', "answer": None}),
        ("r.csv:5", {"id": "3.30", "asked": "NaN", "answer": "true"}),
    ]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (b"1,2,3", "cells"),
        (b"1", "cells"),
        (b'"1"x,2', "quotes"),
        (b"caf\xe9,2", "not_utf8"),
    ],
)
def test_a_record_against_the_rules_is_counted_and_the_rest_read(
    tmp_path: Path, record: bytes, kind: str
) -> None:
    path = written(tmp_path / "r.csv", b"a,b\n0,0\n" + record + b"\n9,9\n")
    (_, first), (place, broken), (_, last) = rows([path], "csv")
    assert (first, last) == ({"a": "0", "b": "0"}, {"a": "9", "b": "9"})
    assert (place, broken.reason) == ("r.csv:3", f"bad_csv:{kind}")


def test_a_quote_that_is_never_closed_is_counted(tmp_path: Path) -> None:
    first, broken = values(written(tmp_path / "r.csv", 'a,b\n0,0\n"1,2\n3,4\n'), "csv")
    assert first == {"a": "0", "b": "0"}
    assert broken.reason == "bad_csv:quotes"


@pytest.mark.parametrize("names", ["a,a", "a,", "a;b", "a\tb", '"a'])
def test_a_first_line_that_names_no_columns_is_refused(tmp_path: Path, names: str) -> None:
    with pytest.raises(RecordError, match=r"r\.csv: expected (commas|a first line)"):
        values(written(tmp_path / "r.csv", f"{names}\n1,2\n"), "csv")


# --- text ---------------------------------------------------------------------------------------------------


def test_a_text_file_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "r.txt", "\ufeff<|start|>user\n\n")
    assert list(rows([path], "text")) == [("r.txt", "<|start|>user\n\n")]
    with pytest.raises(RecordError, match="expected text in UTF-8"):
        values(written(tmp_path / "latin.txt", b"caf\xe9"), "text")
    monkeypatch.setattr(raw_files, "LONGEST_RECORD", 3)
    with pytest.raises(RecordError, match="more than 3 bytes"):
        values(path, "text")


# --- compressed ---------------------------------------------------------------------------------------------


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESSED = [(".gz", gzip.compress), (".zst", zstd)]


@pytest.mark.parametrize(("ending", "compress"), COMPRESSED)
@pytest.mark.parametrize(
    ("file_format", "data"),
    [("jsonl", b'{"a":"1"}\n{"a":"2"}\n'), ("json", b'[{"a":"1"},{"a":"2"}]'), ("csv", b"a\n1\n2\n")],
)
def test_compressed_files_read_like_plain_ones(
    tmp_path: Path, ending: str, compress: Any, file_format: Any, data: bytes
) -> None:
    path = written(tmp_path / f"r.{file_format}{ending}", compress(data))
    assert values(path, file_format) == [{"a": "1"}, {"a": "2"}]


@pytest.mark.parametrize(("ending", "compress"), COMPRESSED)
def test_parts_that_were_put_together_are_one_file(tmp_path: Path, ending: str, compress: Any) -> None:
    path = written(tmp_path / f"r.jsonl{ending}", compress(b"1\n" * 200_000) + compress(b"2\n"))
    assert sum(1 for _ in rows([path], "jsonl")) == 200_001


@pytest.mark.parametrize(("ending", "compress"), COMPRESSED)
def test_compressed_data_that_is_cut_off_stops_the_build(tmp_path: Path, ending: str, compress: Any) -> None:
    whole = compress(json.dumps(list(range(20_000))).encode())
    for data in (whole[:-6], whole[:60]):
        with pytest.raises(
            RecordError, match=rf"r\.json\{ending}: the compressed data is damaged or cut off"
        ):
            values(written(tmp_path / f"r.json{ending}", data), "json")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_name_that_promises_a_compression_is_held_to_it(tmp_path: Path, ending: str) -> None:
    with pytest.raises(RecordError, match=r"is not compressed as its name says"):
        values(written(tmp_path / f"r.jsonl{ending}", '{"a":1}'), "jsonl")


# --- parquet ------------------------------------------------------------------------------------------------

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(pa.string()))])


def parquet(path: Path) -> Path:
    table = pa.table(
        {
            "messages": pa.array([[{"role": "user", "content": "Hi"}], []], pa.list_(MESSAGE)),
            "id": pa.array(["0012", None]),
            "flag": pa.array([True, None]),
            "count": pa.array([2**53 + 1, None]),
            "day": pa.array([datetime.date(2023, 1, 1), None]),
            "log": pa.array(["x" * 10, "y"]),
        }
    )
    pq.write_table(table, path)
    return path


def test_parquet_values_keep_their_types(tmp_path: Path) -> None:
    first, second = values(parquet(tmp_path / "r.parquet"), "parquet")
    assert first["messages"] == [{"role": "user", "content": "Hi", "tool_calls": None}]
    assert (first["id"], first["flag"], first["count"]) == ("0012", True, 2**53 + 1)
    assert first["day"] == datetime.date(2023, 1, 1)
    assert second["id"] is second["flag"] is second["count"] is None


def test_only_wanted_columns_are_read_and_all_are_known(tmp_path: Path) -> None:
    path = parquet(tmp_path / "r.parquet")
    assert list(rows([path], "parquet", {"id", "absent"})) == [
        *[("r.parquet[0]", {"id": "0012"}), ("r.parquet[1]", {"id": None})]
    ]
    assert values(path, "parquet", {"absent"}) == [{}, {}]
    assert raw_files.column_names([path], "parquet") == ["count", "day", "flag", "id", "log", "messages"]


def test_a_damaged_parquet_file_stops_the_build(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "r.parquet").read_bytes()
    with pytest.raises(RecordError, match=r"cut\.parquet: is a damaged parquet file"):
        values(written(tmp_path / "cut.parquet", whole[:-20]), "parquet")


# --- what is no data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0f3b\nsize 487341002\n",
            "Git-LFS pointer.*git lfs",
        ),
        (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", "web page.*download the file itself"),
        (b"<HTML>sign in</HTML>", "web page"),
        (gzip.compress(b'{"a":1}', mtime=0), r"gzip-compressed; let its name end in \.gz"),
        (b"BZh91AY", "bzip2-compressed"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"", "empty.*fetch it again"),
        (b"\xef\xbb\xbf \n", "empty"),
    ],
)
@pytest.mark.parametrize("file_format", ["jsonl", "json", "parquet"])
def test_what_is_no_data_is_named(tmp_path: Path, data: bytes, words: str, file_format: Any) -> None:
    with pytest.raises(RecordError, match=rf"raw\.x: is .*{words}"):
        values(written(tmp_path / "raw.x", data), file_format)


def test_the_wrong_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"is a parquet file, but source.format says jsonl"):
        values(parquet(tmp_path / "r.parquet"), "jsonl")
    with pytest.raises(RecordError, match=r"is no parquet file, but source.format says parquet"):
        values(written(tmp_path / "r.jsonl", '{"a":1}'), "parquet")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"gone\.jsonl: cannot be read: No such file"):
        values(tmp_path / "gone.jsonl", "jsonl")


# --- fetching -----------------------------------------------------------------------------------------------


def local(*files: Path | str) -> SourceSettings:
    return SourceSettings(files=[str(file) for file in files], format="jsonl")


def test_local_files_are_copied_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        written(tmp_path / name, f'{{"name":"{name}"}}\n')
    found = fetch_raw.fetch("d", local(tmp_path / "*.jsonl", tmp_path / "a.jsonl"), tmp_path / "raw")
    assert [file.name for file in found] == ["a.jsonl", "b.jsonl"]
    assert found[0].read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == ["a.jsonl", "b.jsonl"]


def test_a_changed_file_is_copied_again(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", '{"a":1}\n')
    fetch_raw.fetch("d", local(source), tmp_path / "raw")
    written(source, '{"a":2}\n')
    assert fetch_raw.fetch("d", local(source), tmp_path / "raw")[0].read_bytes() == b'{"a":2}\n'


def test_a_pattern_without_files_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path / "config.yaml", "datasets:\n  d:\n    source:\n      files: [nope/*.jsonl]\n")
    monkeypatch.setenv("EYRIE_CONFIG_FILES", str(config))
    with pytest.raises(ConfigError, match=r"config\.yaml:4 datasets\.d\.source\.files: saw 'nope/\*\.jsonl'"):
        fetch_raw.fetch("d", local("nope/*.jsonl"), tmp_path / "raw")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "a.jsonl", "{}\n")
    with pytest.raises(ConfigError, match="bear the same name"):
        fetch_raw.fetch("d", local(tmp_path / "*" / "a.jsonl"), tmp_path / "raw")


def test_a_pointer_is_refused_when_it_is_fetched(tmp_path: Path) -> None:
    pointer = written(tmp_path / "a.jsonl", "version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(RecordError, match="git lfs pull"):
        fetch_raw.fetch("d", local(pointer), tmp_path / "raw")


def hub(revision: str | None, *files: str) -> SourceSettings:
    return SourceSettings(files=list(files), hub_id="someone/chats", revision=revision, format="jsonl")


def test_a_hub_source_without_a_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"datasets\.d\.source: someone/chats without a revision.*other data"
    ):
        fetch_raw.fetch("d", hub(None, "*.jsonl"), tmp_path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_without_a_network_the_command_for_elsewhere_is_shown(tmp_path: Path) -> None:
    command = (
        f"hf download someone/chats --repo-type dataset --revision {COMMIT} --include 'data/*' --local-dir"
    )
    with pytest.raises(ConfigError, match="cannot be reached") as refusal:
        fetch_raw.fetch("d", hub(COMMIT, "data/*"), tmp_path)
    assert f"{command} {tmp_path / COMMIT}" in str(refusal.value)


@pytest.mark.usefixtures("offline")
def test_a_folder_brought_from_elsewhere_is_used(tmp_path: Path) -> None:
    (tmp_path / COMMIT / "data").mkdir(parents=True)
    written(tmp_path / COMMIT / "data" / "b.jsonl", '{"a":1}\n')
    written(tmp_path / COMMIT / "data" / "a.jsonl", '{"a":1}\n')
    written(tmp_path / COMMIT / "README.md", "words")
    found = fetch_raw.fetch("d", hub(COMMIT, "data/*.jsonl"), tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        f"{COMMIT}/data/a.jsonl",
        f"{COMMIT}/data/b.jsonl",
    ]
    with pytest.raises(ConfigError, match=r"holds no file that 'test/\*' names"):
        fetch_raw.fetch("d", hub(COMMIT, "data/*", "test/*"), tmp_path)


def test_the_record_of_equal_files_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "a.jsonl", '{"a":1}\n')
    texts = []
    for folder in ("one", "two"):
        out = tmp_path / folder / "source.json"
        arguments = ["--dataset", "d", "--settings", local(source).model_dump_json(), "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["fetch_raw.py", *arguments])
        fetch_raw.main()
        texts.append(out.read_bytes())
    assert texts[0] == texts[1]
    record = read_json(tmp_path / "one" / "source.json")
    assert record["dataset"] == "d"
    assert record["files"][0] | {"sha256": ""} == {"name": "a.jsonl", "bytes": 8, "sha256": ""}
    assert record["settings"]["format"] == "jsonl"
