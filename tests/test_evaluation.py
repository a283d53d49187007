"""The evaluation of a drafter, run on a tiny random target and an untrained drafter."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import evaluate_drafter
from eyrie.acceptance import Cycle
from eyrie.decoding import DraftedOutput, PlainOutput, greedy
from eyrie.eagle3.checkpoint import save_checkpoint
from eyrie.evaluation import check_identical, family_figures, speed_figures, stored_answers_equal, warnings
from eyrie.gates import GateError
from eyrie.held_out import HeldOutPrompt, choose_prompts, read_held_out, round_robin
from eyrie.measuring import Costs, Decoded, Difference, differences
from eyrie.records import read_json, write_json, write_jsonl
from eyrie.target import Target
from tiny_drafting import LAYER_IDS, random_drafter, save_tiny_target

SETTINGS = {
    "draft_tokens": [3, 5],
    "prompts_per_dataset": 3,
    "max_new_tokens": 14,
    "exact_prompts": 3,
    "bfloat16_prompts": 1,
    "threads": 1,
    "measure_speed": False,
}


def row(number: int, dataset: str, split: str = "held_out", group: str | None = None) -> dict[str, Any]:
    name = f"{dataset}-{number:02d}"
    return {
        "id": name,
        "dataset": dataset,
        "group": group or name,
        "split": split,
        "input_ids": [2 + number % 20, 5, 9, 11, 12, 1],
        "loss_mask": [0, 0, 0, 1, 1, 1],
        "finish_reason": "stop",
    }


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter's checkpoint, and the samples of two datasets."""
    folder = tmp_path_factory.mktemp("build")
    target = Target(save_tiny_target(folder / "target"), "float32", LAYER_IDS)
    save_checkpoint(folder / "checkpoint", random_drafter(target, 3), {})
    write_json(folder / "target.json", {"name": "tiny"})
    write_jsonl(folder / "chat.jsonl", [row(n, "chat") for n in range(4)] + [row(9, "chat", "train")])
    # Every second row of this dataset shares its group with the row before.
    issues = [row(n, "issues", group=f"issue-{n // 2}") for n in range(2)]
    write_jsonl(folder / "issues.jsonl", [*issues, row(8, "issues", "validation")])
    return folder


Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(build: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Runs the command on the build with some settings changed; returns evaluation.json."""

    def run(name: str = "evaluation", **changes: object) -> dict[str, Any]:
        command = [
            "evaluate_drafter.py",
            "--checkpoint",
            "checkpoint",
            "--tokenized",
            "chat.jsonl",
            "issues.jsonl",
        ]
        command += ["--target", "target.json", "--target-path", "target", "--out", f"{name}.json"]
        command += ["--settings", json.dumps(SETTINGS | changes), "--log", "log.txt"]
        monkeypatch.chdir(build)
        monkeypatch.setattr(sys, "argv", command)
        evaluate_drafter.main()
        return read_json(build / f"{name}.json")

    return run


def test_the_file_holds_what_the_report_needs(build: Path, evaluate: Evaluate) -> None:
    result = evaluate()
    assert result["stage"] == "evaluation"
    assert set(result["parents"]) == {
        "checkpoint/model.safetensors",
        "checkpoint/config.json",
        "target.json",
        "chat.jsonl",
        "issues.jsonl",
    }
    # All chosen prompts with the first length; of each dataset the first third, rounded up, with the next.
    assert result["prompts"] == {"3": {"chat": 3, "issues": 2}, "5": {"chat": 1, "issues": 1}}
    assert set(result["acceptance_length"]["5"]) == {"all", "chat", "issues"}
    for key, rates in result["acceptance_by_position"].items():
        assert len(rates) == int(key)
        assert 1 + sum(rates) == pytest.approx(result["acceptance_length"][key]["all"])
    # Three prompts decoded plainly: chat, issues, chat; the first of each has both lengths.
    assert result["identical_outputs"] == {"dtype": "float32", "equal": 5, "total": 5, "differences": []}
    assert result["stored_answers_equal"]["total"] == 3
    assert result["unseen_families"]["datasets"] == ["issues"]
    assert result["bfloat16"]["total"] == 2
    assert result["tokens_per_second"] is result["speed_up"] is result["costs"] is None
    log = (build / "log.txt").read_text()
    assert "acceptance length by dataset" in log
    assert "identical outputs: 5 of 5 in float32" in log


def test_samples_say_who_wrote_each_token(evaluate: Evaluate, build: Path) -> None:
    samples = evaluate()["samples"]
    assert [sample["dataset"] for sample in samples] == ["chat", "issues"]
    target = Target(build / "target", "float32", LAYER_IDS)
    for sample in samples:
        assert {token[1] for token in sample["tokens"]} <= {"accepted", "target"}
        assert {token[1] for token in sample["tokens"] if len(token) > 2} == {"target"}, (
            "refused, then its own"
        )
        assert sample["tokens"][0][1] == "target", "the first token comes out of the prompt's pass"
        assert len(sample["tokens"]) == len(greedy(target, [2, 5, 9], 14).token_ids)


def test_equal_runs_give_equal_bytes_without_speed(build: Path, evaluate: Evaluate) -> None:
    evaluate("first")
    evaluate("second")
    assert (build / "first.json").read_bytes() == (build / "second.json").read_bytes()


def test_speed_is_measured_on_prompts_decoded_both_ways(evaluate: Evaluate) -> None:
    result = evaluate(measure_speed=True, exact_prompts="all", bfloat16_prompts=0)
    assert result["identical_outputs"]["total"] == 5 + 2
    assert result["bfloat16"] is None
    speed = result["tokens_per_second"]
    assert speed["prompts"] == {"3": 5, "5": 2}
    # All five prompts have both ways with 3 drafted, so that the rates are those of the same prompts.
    assert result["speed_up"]["3"] == pytest.approx(speed["drafted"]["3"] / speed["plain"])
    for key in ("3", "5"):
        assert result["speed_up"][key] > 0
        assert result["costs"]["verify_step_ms"][key] > 0
        assert result["costs"]["draft_step_ms"][key] > 0
        assert result["costs"]["predicted_speed_up"][key] > 0


def test_only_held_out_rows_are_used(build: Path, evaluate: Evaluate) -> None:
    assert {sample["id"] for sample in evaluate()["samples"]} == {"chat-00", "issues-00"}
    held_out = read_held_out([build / "issues.jsonl", build / "chat.jsonl"])
    assert [len(rows) for rows in held_out.prompts.values()] == [4, 2]
    assert held_out.families == ["issues"]
    assert held_out.prompts["chat"][1] == HeldOutPrompt("chat-01", "chat", [3, 5, 9], [11, 12, 1])


def test_no_held_out_rows_fail_in_words(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [row(1, "chat", "train"), row(2, "chat", "validation")])
    with pytest.raises(GateError, match=r"(?s)2 rows in 1 datasets.*split\.held_out.*samples"):
        read_held_out([tmp_path / "rows.jsonl"])


def test_rows_supervised_from_the_first_token_have_no_prompt(tmp_path: Path) -> None:
    whole = row(1, "chat") | {"loss_mask": [1] * 6}
    write_jsonl(tmp_path / "rows.jsonl", [whole, row(2, "chat")])
    held_out = read_held_out([tmp_path / "rows.jsonl"])
    assert held_out.without_prompt == {"chat": 1}
    assert [prompt.id for prompt in held_out.prompts["chat"]] == ["chat-02"]


def test_the_answer_ends_before_the_next_turn(tmp_path: Path) -> None:
    turns = row(1, "chat") | {"loss_mask": [0, 1, 1, 0, 1, 1]}
    write_jsonl(tmp_path / "rows.jsonl", [turns])
    prompt = read_held_out([tmp_path / "rows.jsonl"]).prompts["chat"][0]
    assert (prompt.prompt_ids, prompt.answer_ids) == ([3], [5, 9])


def test_round_robin_takes_from_every_dataset_in_turn() -> None:
    rows = {name: [HeldOutPrompt(f"{name}{n}", name, [2], []) for n in range(3)] for name in "ab"}
    rows["b"] = rows["b"][:1]
    assert [prompt.id for prompt in round_robin(choose_prompts(rows, 2))] == ["a0", "b0", "a1"]


PROMPT = HeldOutPrompt("some-id", "chat", [3, 4], [7, 8, 9])


def decoded(plain: list[int] | None, drafted: Mapping[int, list[int]], cycles: list[Cycle]) -> Decoded:
    outputs = {k: DraftedOutput(ids, [False] * len(ids), cycles) for k, ids in drafted.items()}
    output = None if plain is None else PlainOutput(plain, [])
    return Decoded(PROMPT, output, 2.0, outputs, dict.fromkeys(outputs, 1.0))


def test_a_difference_in_float32_stops_the_build(build: Path) -> None:
    target = Target(build / "target", "float32", LAYER_IDS)
    target.model.generation_config.eos_token_id = 24  # no token: the answer does not end by itself
    plain = greedy(target, PROMPT.prompt_ids, 4, with_margins=True)
    wrong = [*plain.token_ids[:2], (plain.token_ids[2] + 1) % 20, 5]
    found = differences(target, [decoded(plain.token_ids, {3: wrong, 5: plain.token_ids}, [])])
    assert found == [Difference("some-id", "chat", 3, 2, plain.margins[2])]
    with pytest.raises(GateError, match=r"(?s)some-id.*3 draft tokens: first at token 2"):
        check_identical(found)
    check_identical([])


def test_stored_answers_are_compared_as_far_as_both_go() -> None:
    outputs = [
        decoded([7, 8], {}, []),
        decoded([7, 8, 9, 10], {}, []),
        decoded([7, 5, 9], {}, []),
        decoded(None, {}, []),
    ]
    assert stored_answers_equal(outputs) == {"equal": 2, "total": 3}


def test_speed_and_prediction() -> None:
    outputs = [decoded([1] * 30, {3: [1] * 30}, [Cycle(3, 2), Cycle(3, 0)])]
    figures = speed_figures(outputs, [3], Costs(10.0, {3: 12.0}, {3: 0.5}))
    assert figures["tokens_per_second"] == {"plain": 15.0, "drafted": {"3": 30.0}, "prompts": {"3": 1}}
    assert figures["speed_up"] == {"3": 2.0}
    assert figures["costs"]["predicted_speed_up"]["3"] == pytest.approx(2.0 / (3 * 0.05 + 1.2))
    assert set(speed_figures(outputs, [3], None).values()) == {None}


def test_a_speed_up_compares_the_same_prompts() -> None:
    both = decoded([1] * 30, {3: [1] * 30, 5: [1] * 30}, [Cycle(5, 2)])
    slow = Decoded(PROMPT, PlainOutput([1] * 10, []), 8.0, {3: both.drafted[3]}, {3: 1.0})
    figures = speed_figures([both, slow], [3, 5], Costs(10.0, {3: 12.0, 5: 12.0}, {3: 0.5, 5: 0.5}))
    assert figures["tokens_per_second"]["prompts"] == {"3": 2, "5": 1}
    assert figures["tokens_per_second"]["plain"] == 4.0
    assert figures["speed_up"] == {"3": 30.0 / 4.0, "5": 2.0}


def test_families_are_reported_apart() -> None:
    outputs = [decoded(None, {3: [1]}, [Cycle(3, 2)])]
    assert family_figures(outputs, ["chat"], [3]) == {"datasets": ["chat"], "acceptance_length": {"3": 3.0}}
    assert family_figures(outputs, ["issues"], [3]) is None


def test_warnings_name_likely_causes() -> None:
    fine = {"acceptance_length": {"3": {"all": 1.8}}, "distinct_bigrams": 0.9}
    assert warnings(fine) == []
    never = warnings(fine | {"acceptance_length": {"3": {"all": 1.0}, "5": {"all": 1.0}}})
    assert len(never) == 1
    assert all(word in never[0] for word in ("layer ids", "d2t", "norm"))
    assert "max_new_tokens" in warnings(fine | {"acceptance_length": {"3": {"all": None}}})[0]
    assert "repeats itself" in warnings(fine | {"distinct_bigrams": 0.1})[0]


class Bytes:
    """A tokenizer of one byte a token."""

    def decode(self, token_ids: list[int], clean_up_tokenization_spaces: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_characters_of_several_tokens_come_whole() -> None:
    text = "aé漢b"
    pieces = evaluate_drafter.token_texts(Bytes(), list(text.encode()))
    assert pieces == ["a", "", "é", "", "", "漢", "b"]
    assert "".join(evaluate_drafter.token_texts(Bytes(), list(text.encode())[:-2])) == "aé\ufffd"


def test_refused_drafts_are_shown_where_the_target_overruled_them() -> None:
    output = DraftedOutput(list(b"axc"), [False, True, False], [Cycle(3, 1)], {2: list(b"yz")})
    assert evaluate_drafter.shown_tokens(Bytes(), output) == [
        ["a", "target"],
        ["x", "accepted"],
        ["c", "target", "yz"],
    ]


def test_threads_come_from_the_settings(evaluate: Evaluate) -> None:
    before = torch.get_num_threads()
    try:
        evaluate(threads=2, prompts_per_dataset=1, bfloat16_prompts=0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
