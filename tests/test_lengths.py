"""How long samples are: counted in the bytes of a row as they would be in its lists."""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie.lengths import histogram, quantiles, read_lengths
from eyrie.records import RecordError, write_jsonl

ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 1)), max_size=40), min_size=1, max_size=8
)


@given(rows=ROWS)
def test_lengths_are_those_of_the_lists(rows: list[list[tuple[int, int]]]) -> None:
    written = [
        {
            "id": "a,1]",
            "input_ids": [token for token, _ in row],
            "loss_mask": [mask for _, mask in row],
            "finish_reason": "11,1",
        }
        for row in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenized_data.jsonl"
        write_jsonl(path, written)
        lengths = read_lengths(path)
    assert list(lengths.answer) == [sum(mask for _, mask in row) for row in rows]
    assert list(lengths.prompt) == [sum(1 - mask for _, mask in row) for row in rows]


@pytest.mark.parametrize("line", ['{"id": 1}', '{"loss_mask":[1],"input_ids":[1]}', '{"input_ids": [1]}'])
def test_a_strange_row_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{line}\n")
    with pytest.raises(RecordError, match=r"rows\.jsonl:1"):
        read_lengths(tmp_path / "rows.jsonl")


@given(lengths=st.lists(st.integers(0, 40_000), max_size=60))
def test_every_sample_is_in_the_bin_of_its_length(lengths: list[int]) -> None:
    edges, counts = histogram(array("I", lengths))
    assert sum(counts) == len(lengths)
    assert edges == sorted(set(edges))
    bounds = list(zip(edges, [*edges[1:], 10**9], counts, strict=False))
    for low, high, count in bounds:
        assert count == sum(low <= length < high for length in lengths)
    assert not counts or (counts[0] > 0 and counts[-1] == 0), "from the first sample to behind the last"


def test_quantiles() -> None:
    assert quantiles(array("I", range(100)), (0.05, 0.5, 0.95)) == [5, 50, 95]
    assert quantiles(array("I"), (0.5,)) == [0]
    assert Counter(quantiles(array("I", [7]), (0.0, 0.5, 1.0))) == {7: 3}
