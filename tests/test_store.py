"""The store: rows survive torn tails and kills, one writer at a time, states come back as they went in."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.journals import (
    Compaction,
    Journal,
    StoreError,
    answers_folder,
    compact_journal,
    find_rows,
    read_journals,
)
from eyrie.store import States, StateStore

RECIPE = {"target_revision": "r", "layer_ids": [1, 2, 3], "dtype": "bfloat16"}


def states(token_ids: list[int], seed: int = 0) -> States:
    generator = torch.Generator().manual_seed(seed + len(token_ids))
    tokens = len(token_ids)
    aux = torch.randn(tokens, 12, generator=generator).bfloat16()
    return States(token_ids, aux, torch.randn(tokens, 4, generator=generator).bfloat16())


def test_the_first_row_under_a_key_wins(tmp_path: Path) -> None:
    for name, value in (("b", 2), ("a", 1)):
        with Journal(tmp_path / f"{name}.jsonl") as journal:
            journal.append([{"key": "k", "value": value}])
    assert read_journals(tmp_path, ["k", "absent"]) == {"k": {"key": "k", "value": 1}}


@given(cut=st.integers(min_value=0, max_value=200))
@settings(max_examples=40)
def test_a_torn_tail_costs_the_torn_row_only(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "a.jsonl"
    rows = [{"key": f"k{i}", "text": "é\u2028" * i} for i in range(5)]
    with Journal(path) as journal:
        journal.append(rows)
    data = path.read_bytes()
    kept = data[: max(0, len(data) - cut)]
    path.write_bytes(kept)
    whole = kept.count(b"\n")
    keys = [row["key"] for row in rows]
    assert list(read_journals(path.parent, keys)) == keys[:whole]
    with Journal(path) as journal:
        journal.append([{"key": "new"}])
    assert list(read_journals(path.parent, [*keys, "new"])) == [*keys[:whole], "new"]


def test_a_torn_tail_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"key":"k"}\n{"key":"' + b"x" * 200_000)
    with Journal(path):
        pass
    assert path.read_bytes() == b'{"key":"k"}\n'


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "a.jsonl"),
        pytest.raises(StoreError, match="written by another process"),
        Journal(tmp_path / "a.jsonl"),
    ):
        pass
    with Journal(tmp_path / "a.jsonl") as journal:
        journal.append([{"key": "k"}])


def test_rows_are_read_one_by_one_the_own_file_first(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        with Journal(tmp_path / f"{name}.jsonl") as journal:
            journal.append([{"key": "k", "value": value}, {"key": name, "value": value}])
    with (tmp_path / "b.jsonl").open("ab") as file:
        file.write(b'{"key":"torn","value":\n{"key":"tail","va')
    with find_rows(tmp_path, ["k", "a", "b", "torn", "tail"], first="b.jsonl") as found:
        assert set(found) == {"k", "a", "b"}
        assert [found[key]["value"] for key in ("b", "k", "a", "k")] == [2, 2, 1, 2]
        assert "torn" not in found and found.get("tail") is None
    with find_rows(tmp_path, ["k"]) as found:
        assert found["k"]["value"] == 1


def test_compaction_keeps_what_a_reader_finds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        journal.append([{"key": f"k{i}", "value": i} for i in range(5)])
    before = path.read_bytes()
    path.write_bytes(before + b'{"key":"k1","value":7}\n{"key":"torn","val\n' + before + b'{"key":"tail"')
    keys = [*(f"k{i}" for i in range(5)), "torn", "tail"]
    found = read_journals(tmp_path, keys)
    assert compact_journal(path) == Compaction(path, kept=5, repeated=6, torn=2)
    assert path.read_bytes() == before
    assert read_journals(tmp_path, keys) == found


def test_compaction_and_writers_shut_each_other_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        journal.append([{"key": "k"}])
        with pytest.raises(StoreError, match="written by another process"):
            compact_journal(path)
    compact_journal(path)
    with Journal(path) as journal:
        journal.append([{"key": "new"}])
    assert list(read_journals(tmp_path, ["k", "new"])) == ["k", "new"]


def test_a_writer_that_was_late_writes_to_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its opening of the file and its lock, a compaction puts another file in its place."""
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        journal.append([{"key": "k"}])
    lock = fcntl.flock

    def lock_late(file: Any, how: int) -> None:
        monkeypatch.setattr("eyrie.journals.fcntl.flock", lock)
        compact_journal(path)
        lock(file, how)

    monkeypatch.setattr("eyrie.journals.fcntl.flock", lock_late)
    with Journal(path) as journal:
        journal.append([{"key": "new"}])
    assert list(read_journals(tmp_path, ["k", "new"])) == ["k", "new"]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from eyrie.journals import Journal
with Journal(Path(sys.argv[1])) as journal:
    for number in range(10**9):
        journal.append([{"key": f"k{number}", "text": "x" * 5000}])
"""


def test_rows_before_a_kill_stay(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "a.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(root / "scripts")]) as process:
        while not path.exists() or path.stat().st_size < 100_000:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    before = path.read_bytes()
    with Journal(path) as journal:
        journal.append([{"key": "after"}])
    whole = before[: before.rfind(b"\n") + 1]
    assert path.read_bytes() == whole + b'{"key":"after"}\n'
    assert len(read_journals(tmp_path, [f"k{i}" for i in range(whole.count(b"\n"))])) == whole.count(b"\n")


def test_states_come_back_as_they_went_in(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RECIPE)
    first, second, third = [1, 2, 3], [4], [5, 6]
    with store.writer("a") as writer:
        writer.add([states(first), states(second)])
        writer.add([states(third)])
    keys = [store.key(ids) for ids in (third, first, second)]
    found = StateStore(tmp_path, RECIPE).find(keys)
    loaded = list(store.load([found[key] for key in keys]))
    assert [sample.token_ids for sample in loaded] == [third, first, second]
    for sample, key in zip(loaded, keys, strict=True):
        expected = states(sample.token_ids)
        assert torch.equal(sample.aux, expected.aux)
        assert torch.equal(sample.last, expected.last)
        assert sample.digest() == found[key].sha256


def test_another_recipe_is_another_place(tmp_path: Path) -> None:
    store, other = StateStore(tmp_path, RECIPE), StateStore(tmp_path, {**RECIPE, "layer_ids": [1, 2, 4]})
    with store.writer("a") as writer:
        writer.add([states([1, 2])])
    assert store.key([1, 2]) != other.key([1, 2])
    assert not other.find([store.key([1, 2]), other.key([1, 2])])


def test_a_vanished_shard_counts_as_not_captured(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RECIPE)
    with store.writer("a") as writer:
        (ref,) = writer.add([states([1, 2])])
    (store.folder / ref.shard).unlink()
    assert store.find([ref.key]) == {}
    # Captured anew it lies elsewhere, and the first row of the index must not hide that.
    with store.writer("a") as writer:
        again, _ = writer.add([states([1, 2]), states([3])])
    assert again.shard != ref.shard
    assert store.find([ref.key]) == {ref.key: again}


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RECIPE)
    with store.writer("a") as writer:
        (ref,) = writer.add([states([1, 2])])
    (store.folder / ref.shard).write_bytes(b"short")
    with pytest.raises(StoreError, match=ref.shard):
        list(store.load([ref]))


def test_states_must_have_a_row_a_token(tmp_path: Path) -> None:
    wrong = States([1, 2, 3], torch.zeros(2, 12), torch.zeros(3, 4))
    with StateStore(tmp_path, RECIPE).writer("a") as writer, pytest.raises(StoreError, match="3 tokens"):
        writer.add([wrong])


def test_answers_of_different_sampling_lie_apart(tmp_path: Path) -> None:
    greedy, warm = ({"sampling": {"temperature": t}} for t in (0.0, 1.0))
    assert answers_folder(tmp_path, greedy) != answers_folder(tmp_path, warm)
    assert answers_folder(tmp_path, greedy) == answers_folder(tmp_path, dict(greedy))
