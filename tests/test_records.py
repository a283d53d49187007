"""Records: strict in, atomic out, and ledgers that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie.records import (
    Ledger,
    RecordError,
    atomic_write,
    canonical_json,
    content_key,
    read_json,
    read_jsonl,
    sha256_file,
    words_key,
    write_json,
    write_jsonl,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Surrogates are not text; they are refused on the way in and cannot be written.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
rows = st.lists(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), json_values, max_size=3), max_size=5
)


@given(rows)
def test_rows_survive_writing_and_reading(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    assert write_jsonl(path, rows) == len(rows)
    assert list(read_jsonl(path)) == rows


def test_only_the_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = "a\u2028b\u2029c\u0085d\x0be"
    path.write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
    assert list(read_jsonl(path)) == [{"text": text}]


def test_a_byte_order_mark_and_blank_lines_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\r\n\n  \n{"a":2}')
    assert list(read_jsonl(path)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a":1,"a":2}', "duplicate keys ['a']"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":-Infinity}', "-Infinity is not JSON"),
        (b'{"a":"\\ud83d"}', "lone surrogate"),
        (b'{"\\ud83d":1}', "lone surrogate"),
        (b'{"a":"\xe9"}', "utf-8"),
        (b'{"a":', "Expecting value"),
        (b"[1]", "saw list"),
        (b'{"a":"x\xef\xbb\xbf"}}', "Extra data"),
    ],
)
def test_what_is_not_json_is_refused_with_its_line(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"fine":true}\n' + line + b"\n")
    with pytest.raises(RecordError) as caught:
        list(read_jsonl(path))
    assert f"{path}:2" in str(caught.value)
    assert words in str(caught.value)


def test_a_surrogate_pair_is_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":"\\ud83d\\ude00"}\n')
    assert list(read_jsonl(path)) == [{"a": "\U0001f600"}]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"old": True})
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert read_json(path) == {"old": True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_broken_document_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("{")
    with pytest.raises(RecordError, match=r"out\.json"):
        read_json(path)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), json_values, max_size=5))
def test_a_key_does_not_depend_on_the_order_of_keys(value: dict) -> None:
    turned = dict(reversed(value.items()))
    assert canonical_json(turned) == canonical_json(value)
    assert content_key("kind", turned) == content_key("kind", value)


def test_keys_of_different_parts_differ() -> None:
    assert content_key("a", "b") != content_key("ab")
    assert content_key(["a"], "b") != content_key(["a", "b"])


def key_of_words(text: str) -> str:
    return content_key("kind", " ".join(text.split()))


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text(' \n\t\x1f\0\x7f\u0085\u00a0\u3000é"\\a'))
def test_a_key_of_words_is_the_key_of_the_text_with_single_spaces(text: str) -> None:
    assert words_key("kind", text) == key_of_words(text)


def test_a_key_of_words_knows_every_white_space() -> None:
    for sign in map(chr, range(0x110000)):
        if sign.isspace() or ord(sign) < 0x100:
            text = f" a{sign}{sign}b"
            assert words_key("kind", text) == key_of_words(text), hex(ord(sign))


@given(st.lists(st.sampled_from(["", "empty_prompt", "duplicate_prompt"])))
def test_a_ledger_adds_up(reasons: list[str]) -> None:
    ledger = Ledger()
    for reason in reasons:
        if reason:
            ledger.skip(reason)
        else:
            ledger.keep()
    written = ledger.as_dict()
    assert written["in"] == len(reasons)
    assert written["in"] == written["kept"] + sum(written["skipped"].values())  # type: ignore[operator, attr-defined]


def test_digest_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
