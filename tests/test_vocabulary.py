"""The draft vocabulary: which tokens are chosen, and that its file is held to what the drafter needs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eyrie.config import ConfigError
from eyrie.eagle3.vocabulary import (
    Frequencies,
    check_coverage,
    choose_tokens,
    count_tokens,
    coverage,
    pinned_tokens,
    read_vocabulary,
)
from eyrie.records import RecordError, read_json, write_json, write_jsonl

VOCABULARY = 30
NOTHING = Frequencies(np.zeros(VOCABULARY, dtype=np.int64), np.zeros(VOCABULARY, dtype=np.int64))


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, object]]:
    result = []
    for index in range(draw(st.integers(0, 6))):
        pairs = draw(st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.integers(0, 1)), max_size=20))
        split = draw(st.sampled_from(["train", "validation"]))
        ids, mask = [token for token, _ in pairs], [flag for _, flag in pairs]
        result.append({"id": str(index), "split": split, "input_ids": ids, "loss_mask": mask})
    return result


@given(rows=rows(), size=st.integers(1, VOCABULARY))
def test_the_most_frequent_supervised_tokens_are_chosen(rows: list[dict[str, object]], size: int) -> None:
    counted = count_tokens(rows, VOCABULARY)
    pairs = [
        pair
        for row in rows
        if row["split"] == "train"
        for pair in zip(row["input_ids"], row["loss_mask"], strict=True)
    ]
    expected, elsewhere = (Counter(token for token, flag in pairs if flag == wanted) for wanted in (1, 0))
    train = counted.get("train", NOTHING)
    assert train.supervised.tolist() == [expected[token] for token in range(VOCABULARY)]
    assert train.elsewhere.tolist() == [elsewhere[token] for token in range(VOCABULARY)]

    chosen = choose_tokens(train, size).tolist()
    assert len(chosen) == size and chosen == sorted(set(chosen))

    def rank(token: int) -> tuple[int, int, int]:
        return (-expected[token], 0 if expected[token] else -elsewhere[token], token)

    assert chosen == sorted(sorted(range(VOCABULARY), key=rank)[:size])
    share = coverage(train.supervised, np.array(chosen))
    if expected:
        assert share == sum(expected[token] for token in chosen) / expected.total()
    else:
        assert share is None


def test_more_tokens_than_the_target_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size: saw 31; expected at most 30"):
        choose_tokens(NOTHING, 31)


def test_token_of_another_target_is_an_error() -> None:
    row = {"id": "a", "split": "train", "input_ids": [3, 30], "loss_mask": [1, 1]}
    with pytest.raises(RecordError, match=r"row a: token ids from 3 to 30; expected ids from 0 to 29"):
        count_tokens([row], VOCABULARY)


@pytest.mark.parametrize("ids", [[], [2, 2], [3, 1], [-1, 4], [4, VOCABULARY]])
def test_a_broken_file_is_refused(tmp_path: Path, ids: list[int]) -> None:
    write_json(tmp_path / "v.json", {"vocab_size": VOCABULARY, "token_ids": ids})
    with pytest.raises(RecordError, match="rising"):
        read_vocabulary(tmp_path / "v.json", VOCABULARY)


def test_a_file_for_another_target_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "v.json", {"vocab_size": VOCABULARY, "token_ids": [1]})
    with pytest.raises(RecordError, match="made for 30 tokens, but the target has 31"):
        read_vocabulary(tmp_path / "v.json", VOCABULARY + 1)


def build(folder: Path, *sizes: int, **options: object) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parent.parent / "scripts" / "build_vocabulary.py"
    files = sorted(str(path) for path in folder.glob("*.jsonl"))
    command = [sys.executable, script, "--tokenized", *files, "--target", folder / "target.json"]
    command += ["--size", str(sizes[0]), "--out", folder / "vocabulary.json"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_counts_train_alone_and_reports_coverage(tmp_path: Path) -> None:
    write_json(tmp_path / "target.json", {"vocab_size": VOCABULARY})
    row = {"id": "a", "split": "train", "input_ids": [9, 5, 5, 7], "loss_mask": [0, 1, 1, 1]}
    seen = {**row, "split": "validation", "input_ids": [1, 5, 8, 8], "loss_mask": [1, 1, 1, 1]}
    unseen = {**row, "split": "held_out", "input_ids": [2] * 4, "loss_mask": [1] * 4}
    write_jsonl(tmp_path / "a.jsonl", [row, unseen])
    write_jsonl(tmp_path / "b.jsonl", [seen])
    result = build(tmp_path, 3)
    assert result.returncode == 0, result.stderr
    data = read_json(tmp_path / "vocabulary.json")
    # Two tokens are supervised in training; the one that only its prompt holds comes next.
    assert data["token_ids"] == [5, 7, 9]
    assert data["coverage"] == {"train": 1.0, "validation": 0.25}
    assert (data["supervised_tokens"], data["distinct"]) == (3, 2)
    assert (data["draft_vocab_size"], data["vocab_size"]) == (3, VOCABULARY)


def test_command_without_an_answer_to_count_says_so(tmp_path: Path) -> None:
    write_json(tmp_path / "target.json", {"vocab_size": VOCABULARY})
    write_jsonl(tmp_path / "a.jsonl", [{"id": "a", "split": "train", "input_ids": [1], "loss_mask": [0]}])
    result = build(tmp_path, 3)
    assert result.returncode == 1
    assert "no supervised token in the train split" in result.stderr
    assert "Traceback" not in result.stderr


@given(rows=rows(), size=st.integers(1, VOCABULARY))
def test_fewer_tokens_than_asked_for_are_filled_up_by_id(rows: list[dict[str, object]], size: int) -> None:
    """However few different tokens there are, the vocabulary has its size; unused ones come by id."""
    counted = count_tokens(rows, VOCABULARY).get("train", NOTHING)
    chosen = set(choose_tokens(counted, size).tolist())
    seen = {token for token in range(VOCABULARY) if counted.supervised[token] or counted.elsewhere[token]}
    assert len(chosen) == size
    if len(seen) < size:
        unused = [token for token in range(VOCABULARY) if token not in seen]
        assert chosen == seen | set(unused[: size - len(seen)])


def pinned_build(tmp_path: Path) -> None:
    write_json(tmp_path / "target.json", {"vocab_size": VOCABULARY})
    row = {"id": "a", "split": "train", "input_ids": [9, 5, 5, 7], "loss_mask": [0, 1, 1, 1]}
    write_jsonl(tmp_path / "a.jsonl", [row, {**row, "split": "validation"}])


def test_a_pinned_vocabulary_is_taken_as_it_is(tmp_path: Path) -> None:
    """From an earlier vocabulary.json, and from the maps of a checkpoint."""
    pinned_build(tmp_path)
    write_json(tmp_path / "earlier.json", {"vocab_size": VOCABULARY, "token_ids": [2, 5, 7]})
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[[2, 5, 7]] = True
    d2t = torch.tensor([2, 5, 7]) - torch.arange(3)
    # A real checkpoint's other tensors are bfloat16, which numpy does not know.
    tensors = {"d2t": d2t, "t2d": t2d, "fc.weight": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("earlier.json", "model.safetensors"):
        result = build(tmp_path, 3, pinned=tmp_path / name)
        assert result.returncode == 0, result.stderr
        data = read_json(tmp_path / "vocabulary.json")
        assert data["token_ids"] == [2, 5, 7] and data["coverage"]["validation"] == 1.0
        assert str(tmp_path / name) in data["parents"]


def test_a_pinned_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "earlier.json", {"vocab_size": VOCABULARY, "token_ids": [2, 5, 7]})
    with pytest.raises(ConfigError, match=r"holds 3 tokens, but drafter.draft_vocab_size is 4"):
        pinned_tokens(tmp_path / "earlier.json", VOCABULARY, 4)


@pytest.mark.parametrize("tokens", [VOCABULARY, VOCABULARY - 1])
def test_a_pinned_checkpoint_for_another_target_is_refused(tmp_path: Path, tokens: int) -> None:
    """Another number of tokens, or a map that leads beyond them."""
    tensors = {"d2t": torch.tensor([0, VOCABULARY]), "t2d": torch.zeros(tokens, dtype=torch.bool)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RecordError, match=r"rising, different ids below 30|a drafter for 29 tokens"):
        pinned_tokens(tmp_path / "model.safetensors", VOCABULARY, 2)


def test_too_small_a_coverage_stops_the_build(tmp_path: Path) -> None:
    pinned_build(tmp_path)
    result = build(tmp_path, 1, min_coverage=0.8)
    assert result.returncode == 1 and not (tmp_path / "vocabulary.json").exists()
    assert "holds 66.7% of the supervised tokens of the validation rows" in result.stderr
    assert "expected: at least 80.0%" in result.stderr and "drafter.min_coverage" in result.stderr
    check_coverage(0.8, 0.8)
    check_coverage(0.1, None)
    check_coverage(None, 0.8)
