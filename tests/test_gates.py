"""Gates: each closes where it should and nowhere else, in words, and warns where it is told to."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import check_selection
from eyrie import gates
from eyrie.config import Config, DatasetSettings, GateSettings, parse_config
from eyrie.gates import GateError, check_answers, check_rows, check_samples
from eyrie.recipes import selection_recipe
from eyrie.records import Ledger, read_json, write_json

NATIVE = {"kind": "native", "native_model": "kimi"}


def ledger(kept: int, **skipped: int) -> Ledger:
    made = Ledger()
    made.kept = kept
    made.skipped.update(skipped)
    return made


def dataset(
    expected_rows: Any = None, gates: dict[str, Any] | None = None, **changes: Any
) -> DatasetSettings:
    source = {"files": ["a.jsonl"], "format": "jsonl", "expected_rows": expected_rows}
    plain = {"source": source, "licence": "mit", "layout": "messages", "kind": "prompts"}
    return DatasetSettings.model_validate({**plain, "gates": gates or {}, **changes})


def judge(counts: Ledger, settings: DatasetSettings) -> list[str]:
    return check_rows("d", "a.jsonl", counts, settings, "in each row: a chat")


# --- raw rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "settings", "words"),
    [
        (ledger(0), dataset(), "kept 0 of 0 rows (0% of those judged); skipped: no row at all"),
        (ledger(0, duplicate_prompt=0, no_user_turn=3), dataset(), "skipped: 3 no_user_turn"),
        (ledger(0, contaminated=9), dataset(), "kept 0 of 9 rows"),
        (ledger(4, unknown_role=5), dataset(), "a share of 50%; in each row: a chat"),
        (ledger(9), dataset(gates={"min_kept": 10}), "at least 10 rows"),
        (ledger(1, duplicate_prompt=99), dataset(), "99 of 100 rows repeat a prompt (99.0%)"),
        (ledger(1, duplicate_prompt=90, near_duplicate=9), dataset(), "99 of 100 rows repeat a prompt"),
        (
            ledger(9, no_supervised_text=2),
            dataset(gates={"max_empty_answer_share": 0.1}, **NATIVE),
            "2 of 11",
        ),
        (ledger(99), dataset(expected_rows=100), "seen: 99 rows\n  expected: 100; another release"),
        (ledger(1001), dataset(expected_rows={"max": 1000}), "seen: 1,001 rows\n  expected: at most 1,000"),
        (ledger(5, bad_json=4), dataset(expected_rows={"min": 10}), "seen: 9 rows\n  expected: at least 10"),
        (ledger(5), dataset(expected_rows={"min": 6, "max": 9}), "expected: 6 to 9"),
    ],
)
def test_a_gate_closes(counts: Ledger, settings: DatasetSettings, words: str) -> None:
    with pytest.raises(GateError) as refusal:
        judge(counts, settings)
    assert words in str(refusal.value)
    assert "change: " in str(refusal.value)


@pytest.mark.parametrize(
    ("counts", "settings"),
    [
        (ledger(1), dataset()),
        (ledger(5, unknown_role=5), dataset()),
        # What was left out by wish says nothing about how the file was read.
        (ledger(5, over_cap=500, over_group_cap=500, contaminated=500, unknown_role=5), dataset()),
        (ledger(2, duplicate_prompt=98), dataset()),
        (ledger(5, no_supervised_text=5), dataset(**NATIVE)),
        # Where the target answers, the row's own answer plays no part.
        (ledger(5, no_supervised_text=5), dataset(gates={"max_empty_answer_share": 0.1})),
        (ledger(60, bad_json=40), dataset(expected_rows=100)),
        (ledger(6), dataset(expected_rows={"min": 6, "max": 9})),
    ],
)
def test_a_gate_stays_open(counts: Ledger, settings: DatasetSettings) -> None:
    assert judge(counts, settings) == []


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(GateError) as refusal:
        judge(ledger(1, duplicate_prompt=99, unknown_role=5), dataset(expected_rows=7))
    words = str(refusal.value)
    assert "a share of 50%" in words
    assert "expected: 7;" in words
    assert "rows repeat a prompt" in words


def test_a_dataset_may_only_warn(caplog: pytest.LogCaptureFixture) -> None:
    settings = dataset(expected_rows=7, gates={"on_fail": "warn"})
    with caplog.at_level(logging.WARNING):
        warnings = judge(ledger(1, unknown_role=5), settings)
    assert ["a share of 50%" in warnings[0], "expected: 7;" in warnings[1]] == [True, True]
    assert "the build goes on" in caplog.text
    with pytest.raises(GateError, match="kept 0 of 5 rows"):
        judge(ledger(0, unknown_role=5), settings)


# --- answers and samples ------------------------------------------------------------------------------------


def test_cut_and_failed_answers() -> None:
    allowed = GateSettings(max_truncated_share=0.5, max_failed_share=0.1)
    assert check_answers("d", 9, 4, 1, allowed) == []
    with pytest.raises(GateError, match=r"6 of 10 prompts cut at max_new_tokens \(60\.0%\)"):
        check_answers("d", 10, 6, 0, allowed)
    with pytest.raises(GateError, match=r"2 of 10 prompts without an answer"):
        check_answers("d", 8, 0, 2, allowed)
    warned = allowed.model_copy(update={"on_fail": "warn"})
    assert len(check_answers("d", 10, 8, 2, warned)) == 2
    with pytest.raises(GateError, match="without an answer"):
        check_answers("d", 0, 0, 2, warned)


def test_masks_that_are_all_zero() -> None:
    with pytest.raises(GateError, match=r"1 of 1000 loss masks are all zero \(0\.1%\)"):
        check_samples("d", ledger(999, no_supervised_text=1), GateSettings())
    assert check_samples("d", ledger(999, too_long=1), GateSettings()) == []
    allowed = GateSettings(max_unsupervised_share=0.01)
    assert check_samples("d", ledger(999, no_supervised_text=1), allowed) == []


def test_too_few_samples() -> None:
    with pytest.raises(GateError, match=r"6 too_long, 1 template_error\n.*\n  change: hidden_states"):
        check_samples("d", ledger(3, too_long=6, template_error=1), GateSettings())
    with pytest.raises(GateError, match="0 of 0 rows became samples; skipped: no row at all"):
        check_samples("d", ledger(0), GateSettings())
    # Cut answers are left out by wish.
    assert check_samples("d", ledger(3, truncated=60), GateSettings()) == []
    with pytest.raises(GateError, match="some_new_reason"):
        check_samples("d", ledger(3, some_new_reason=60), GateSettings())


def test_every_reason_that_is_wanted_is_one_of_the_selection() -> None:
    assert {
        *("duplicate_prompt", "near_duplicate", "over_cap", "over_group_cap", "contaminated")
    } == gates.WANTED_SKIPS


# --- the whole build ----------------------------------------------------------------------------------------


def config(**expected: Any) -> Config:
    plain = {"source": {"files": ["a"], "format": "jsonl"}, "licence": "mit", "layout": "messages"}
    return parse_config(
        {
            "target": {"name": "t", "path": "t"},
            "partitions": {"short": {"max_new_tokens": 1}},
            "datasets": {
                "own": {**plain, **NATIVE, "samples": 4},
                "asked": {**plain, "kind": "prompts", "samples": 6},
                "more": {**plain, "kind": "prompts", "samples": 10},
            },
            "expected_samples": expected,
        }
    )


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"own": 4, "asked": 6, "more": 10}, None),
        ({"own": 3, "asked": 6, "more": 10}, "kind native\n  seen: 3: own 3\n  expected: 4\n"),
        (
            {"own": 4, "asked": 6, "more": 8},
            "kind prompts\n  seen: 14: asked 6, more 8\n  expected: 15 to",
        ),
    ],
)
def test_the_sum_of_all_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: dict[str, int], words: str | None
) -> None:
    paths = [tmp_path / f"{name}.json" for name in kept]
    for path, (name, count) in zip(paths, kept.items(), strict=True):
        write_json(path, {"dataset": name, "kept": count})
    recipe = selection_recipe(config(native=4, prompts={"min": 15, "max": 16}))
    line = ["x", "--recipe", recipe, "--out", str(tmp_path / "selection.json"), "--ledgers", *map(str, paths)]
    monkeypatch.setattr("sys.argv", line)
    if words is None:
        check_selection.main()
        found = read_json(tmp_path / "selection.json")["kept"]
        assert found == {"native": {"own": 4}, "prompts": {"asked": 6, "more": 10}}
    else:
        with pytest.raises(GateError) as refusal:
            check_selection.main()
        assert words in str(refusal.value)
        assert not (tmp_path / "selection.json").exists()


def test_only_what_is_expected_is_counted() -> None:
    asked = json.loads(selection_recipe(config(prompts=16)))
    assert list(asked) == ["prompts"]
    assert config().expected_by_kind() == {}
