"""Selection: what is kept depends on the rows alone; near repetitions and benchmarks are found."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import ConfigError, DecontaminationSettings
from eyrie.contamination import Benchmarks
from eyrie.near_duplicates import NearDuplicates
from eyrie.questions import prompt_id
from eyrie.records import RecordError, content_key
from eyrie.selection import InTurn, Left, LowestHashes, Selection, prompt_text
from eyrie.words import words_of

WORDS = [f"word{number}" for number in range(400)]


def row(text: str, group: str | None = None) -> dict[str, Any]:
    row_id = prompt_id(text)
    messages = [{"role": "user", "content": text}]
    return {"id": row_id, "dataset": "d", "group": group or row_id, "messages": messages}


def run(selection: Selection, offered: list[dict[str, Any]]) -> tuple[list[str], list[Left]]:
    """The texts selected, and all that were left out."""
    gone = [selection.offer(one, f"f:{n}", []) for n, one in enumerate(offered)]
    left = [*filter(None, gone), *selection.finish()]
    return [prompt_text(one) for one in selection.in_order()], left


def reasons(left: list[Left]) -> Counter[str]:
    return Counter(gone.reason for gone in left)


def by_hash(texts: list[str]) -> list[str]:
    return sorted(texts, key=lambda text: content_key("sample", prompt_id(text)))


# --- caps ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    texts=st.lists(st.integers(0, 9).map(lambda n: f"question {n}"), max_size=25),
    cap=st.none() | st.integers(1, 6),
    data=st.data(),
)
def test_both_ways_select_the_lowest_hashes(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cap: int | None, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("waiting")
    shuffled = data.draw(st.permutations(texts))
    chosen = by_hash(sorted(set(texts)))[: cap or len(texts)]
    for selection in (LowestHashes(cap), InTurn(folder, cap, None, None)):
        kept, left = run(selection, [row(text) for text in shuffled])
        assert kept == sorted(chosen, key=prompt_id)
        assert len(kept) + len(left) == len(texts)
        assert reasons(left)["duplicate_prompt"] == len(texts) - len(set(texts))
        assert reasons(left)["over_cap"] == len(set(texts)) - len(kept)
    assert list(folder.iterdir()) == []


@settings(max_examples=60)
@given(
    groups=st.lists(st.sampled_from("abc"), max_size=16),
    per_group=st.integers(1, 3),
    cap=st.none() | st.integers(1, 6),
    data=st.data(),
)
def test_a_group_has_at_most_its_share_of_the_lowest_hashes(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[str],
    per_group: int,
    cap: int | None,
    data: st.DataObject,
) -> None:
    offered = [row(f"question {number}", group) for number, group in enumerate(groups)]
    expected: list[str] = []
    taken: Counter[str] = Counter()
    for one in sorted(offered, key=lambda one: content_key("sample", one["id"])):
        if taken[one["group"]] < per_group and len(expected) < (cap or len(groups)):
            taken[one["group"]] += 1
            expected.append(one["id"])
    found = []
    for order in (offered, data.draw(st.permutations(offered))):
        selection = InTurn(tmp_path_factory.mktemp("waiting"), cap, per_group, None)
        _, left = run(selection, list(order))
        assert [one["id"] for one in selection.in_order()] == sorted(expected)
        assert len(left) == len(offered) - len(expected)
        found.append(reasons(left))
    assert found[0] == found[1]


def test_rows_that_wait_come_back_as_they_were(tmp_path: Path) -> None:
    one = row("a\u2028b \U0001f600 \\ud83d\n")
    one["tools"] = [{"function": {"name": "f", "parameters": {"x": [1, 2.5, None]}}}]
    selection = InTurn(tmp_path, None, None, None)
    assert selection.offer(one, "f:1", ["mended", "twice"]) is None
    assert list(selection.finish()) == []
    assert json.dumps(selection.in_order()) == json.dumps([one])
    assert selection.notes() == {"mended": 1, "twice": 1}


def test_what_a_tokenized_row_asks() -> None:
    assert prompt_text({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}) == "5 6"


# --- near duplicates ----------------------------------------------------------------------------------------


def shingles(text: str, length: int) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def variants(families: int, seed: int) -> Iterator[str]:
    """Texts in families of six, each a little or much changed."""
    source = random.Random(seed)
    for _ in range(families):
        words = source.choices(WORDS, k=source.randint(4, 120))
        yield " ".join([*words[:-1], "end"])
        for changes in (0, 1, 2, 5, 20):
            changed = list(words)
            for _ in range(min(changes, len(words))):
                changed[source.randrange(len(words))] = source.choice(WORDS)
            yield " ".join(changed)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_near_duplicates_are_those_of_the_definition(threshold: float) -> None:
    near = NearDuplicates(threshold, 3)
    kept: list[set[tuple[str, ...]]] = []
    found = 0
    for text in variants(30, seed=1):
        own = shingles(text, 3)
        expected = any(len(own & other) / len(own | other) >= threshold for other in kept)
        assert near.repeats(text) == expected
        found += expected
        if not expected:
            kept.append(own)
    assert 15 <= found <= 150


def test_spelling_and_punctuation_make_no_difference() -> None:
    near = NearDuplicates(0.9, 5)
    assert not near.repeats("Write a function that adds two numbers, please.")
    assert near.repeats("  write A function -- that adds two numbers please!\n")
    assert not near.repeats("Write a function that divides two numbers, please.")


@pytest.mark.parametrize("text", ["", "!?", "\U0001f600", "one", "\u4f60\u597d", "x " * 30_000])
def test_odd_texts_repeat_only_themselves(text: str) -> None:
    near = NearDuplicates(0.8, 5)
    assert not near.repeats("something else entirely, and long enough for shingles")
    assert not near.repeats(text)
    assert near.repeats(text)


def test_of_near_duplicates_the_lowest_hash_stays(tmp_path: Path) -> None:
    texts = [f"please explain in detail how tides arise in the north sea {n}" for n in "abcdef"]
    for order in itertools.islice(itertools.permutations(texts), 0, 720, 97):
        selection = InTurn(tmp_path, None, None, NearDuplicates(0.6, 3))
        kept, left = run(selection, [row(text) for text in order])
        assert kept == by_hash(texts)[:1]
        assert reasons(left) == {"near_duplicate": 5}


def test_a_near_duplicate_takes_no_place_under_the_cap(tmp_path: Path) -> None:
    alike = [f"please explain in detail how tides arise in the north sea {n}" for n in range(10)]
    others = [" ".join(random.Random(n).choices(WORDS, k=20)) for n in range(10)]
    kept, left = run(
        InTurn(tmp_path, 5, None, NearDuplicates(0.6, 3)), [row(text) for text in alike + others]
    )
    assert len(kept) == 5
    assert len(set(kept) & set(alike)) <= 1
    assert sum(reasons(left).values()) == 15


def test_the_hashes_are_those_of_any_other_process() -> None:
    program = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "from eyrie.near_duplicates import NearDuplicates as N\n"
        "n = N(0.8, 5); print(n._bands_of(n._shingles('a b c d e f g h'))[3].hex())"
    )
    root = Path(__file__).resolve().parents[1]
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    near = NearDuplicates(0.8, 5)
    assert said == {near._bands_of(near._shingles("a b c d e f g h"))[3].hex() + "\n"}


# --- words and benchmarks -----------------------------------------------------------------------------------


def test_what_a_word_is() -> None:
    assert words_of("Don't_stop, 3.5 \uff21\uff22\uff23!") == ["don", "t", "stop", "3", "5", "abc"]
    assert words_of("\u6c42\u548cSUM\uff1a\u30ab\u30ca") == ["\u6c42", "\u548c", "sum", "\u30ab", "\u30ca"]
    assert words_of("Stra\u00dfe e\u0301t\u00e9 \u00c9T\u00c9") == ["strasse", *["\u00e9t\u00e9"] * 2]
    assert words_of(" _-\n") == []


TASK = "Write a function that returns the n smallest prime numbers above a given bound as a sorted list."


def benchmarks(tmp_path: Path, lines: list[Any], **changes: Any) -> Benchmarks:
    path = tmp_path / "benchmark.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Benchmarks("d", DecontaminationSettings.model_validate({"files": [str(path)]} | changes))


def test_a_run_of_words_is_shared_or_not(tmp_path: Path) -> None:
    found = benchmarks(tmp_path, [{"prompt": TASK}])
    inside = f"Hello! {TASK.upper().replace(' ', '  ')} Thank you"
    assert found.shared(["nothing here", inside]) == " ".join(words_of(TASK)[:13])
    assert found.shared([" ".join(TASK.split()[:12])]) is None
    assert found.shared([" ".join(TASK.split()[:13])]) is not None
    assert benchmarks(tmp_path, [{"prompt": TASK}], ngram=5).shared([" ".join(TASK.split()[3:8])])


@settings(max_examples=80)
@given(
    task=st.lists(st.sampled_from("abcd"), min_size=1, max_size=8),
    text=st.lists(st.sampled_from("abcd"), max_size=12),
    ngram=st.integers(1, 5),
)
def test_the_index_finds_what_a_search_finds(
    tmp_path_factory: pytest.TempPathFactory, task: list[str], text: list[str], ngram: int
) -> None:
    found = benchmarks(tmp_path_factory.mktemp("b"), [{"q": " ".join(task)}], ngram=ngram)
    runs = [task[i : i + ngram] for i in range(len(task) - ngram + 1)]
    expected = any(text[i : i + ngram] in runs for i in range(len(text) - ngram + 1))
    if len(task) < ngram:
        expected = text == task
    assert (found.shared([" ".join(text)]) is not None) == expected


def test_a_short_benchmark_prompt_counts_as_a_whole(tmp_path: Path) -> None:
    found = benchmarks(tmp_path, [{"prompt": "Who wrote Faust?"}])
    assert found.shared(["who wrote faust"]) == "who wrote faust"
    assert found.shared(["Tell me who wrote Faust?"]) is None
    assert found.shared(["", "?!"]) is None


def test_the_named_columns_alone_are_read(tmp_path: Path) -> None:
    lines = [{"task": {"prompt": "short"}, "solution": TASK}]
    assert benchmarks(tmp_path, lines).shared([TASK])
    assert benchmarks(tmp_path, lines, fields=["task.prompt"]).shared([TASK]) is None
    turns = [{"turns": [{"role": "user", "content": TASK}]}]
    assert benchmarks(tmp_path, turns, fields=["turns"]).shared([TASK])
    with pytest.raises(RecordError, match=r"benchmark\.jsonl:1: missing_column:question; decontaminate\.f"):
        benchmarks(tmp_path, lines, fields=["question"])


def test_a_benchmark_that_cannot_be_compared_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no text"):
        benchmarks(tmp_path, [{"n": 1}])
    (tmp_path / "b.jsonl").write_text('{"a": "x"}\n{"a": \n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"b\.jsonl:2.*a benchmark must be read whole"):
        Benchmarks("d", DecontaminationSettings(files=[str(tmp_path / "b.jsonl")]))
    with pytest.raises(ConfigError, match=r"decontaminate\.files: saw '.*absent\*', which names no file"):
        Benchmarks("d", DecontaminationSettings(files=[str(tmp_path / "absent*")]))
    (tmp_path / "b.xlsx").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"saw b\.xlsx, expected a file of \.jsonl, \.json, \.csv, \.par"):
        Benchmarks("d", DecontaminationSettings(files=[str(tmp_path / "b.xlsx")]))
