"""The serve check, with children that stand in for vLLM and replay what Eyrie's own decoding wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import serve_check
from eyrie.decoding import speculative
from eyrie.eagle3.checkpoint import save_checkpoint
from eyrie.engines.questions import IdentityError
from eyrie.errors import BuildError
from eyrie.gates import GateError
from eyrie.measuring import load_pair
from eyrie.records import read_json, write_json, write_jsonl
from eyrie.serving_check.counters import Counters, of_cycles, parse_counters, settled
from eyrie.serving_check.findings import findings
from eyrie.serving_check.own import accepted_until
from eyrie.serving_check.servers import captured_layers
from eyrie.target import Target
from tiny_drafting import LAYER_IDS, random_drafter, save_tiny_target

FAKE = Path(__file__).parent / "fake_vllm.py"
DRAFT_TOKENS, NEW_TOKENS = 3, 12
# What the check asks for beyond the prompts' own answers: the canary.
STORED_TOKENS = 32


def row(number: int, dataset: str) -> dict[str, Any]:
    name = f"{dataset}-{number}"
    return {
        "id": name,
        "dataset": dataset,
        "group": name,
        "split": "held_out",
        "input_ids": [3 + number, 5 + len(dataset), 9 + number, 11, 12, 1],
        "loss_mask": [0, 0, 0, 1, 1, 1],
        "finish_reason": "stop",
    }


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a checkpoint, held-out rows, and the answers that the stand-ins replay."""
    folder = tmp_path_factory.mktemp("served")
    target = Target(save_tiny_target(folder / "target"), "float32", LAYER_IDS)
    drafter = random_drafter(target, 3)
    drafter.lm_head.weight.data += 3 * target.embedding_weight()[drafter.t2d]
    save_checkpoint(folder / "checkpoint", drafter, {})
    write_json(folder / "target.json", {"name": "tiny", "vocab_size": 24, "eos_ids": [1], "hidden_size": 16})
    rows = [row(number, dataset) for dataset in ("chat", "codes") for number in range(3)]
    write_jsonl(folder / "rows.jsonl", rows)
    pair = load_pair(folder / "target", folder / "checkpoint", "float32")
    answers = []
    for prompt_ids in (one["input_ids"][:3] for one in rows):
        longer = speculative(*pair, prompt_ids, STORED_TOKENS, DRAFT_TOKENS)
        counted = speculative(*pair, prompt_ids, NEW_TOKENS + DRAFT_TOKENS, DRAFT_TOKENS)
        accepted = accepted_until(counted, NEW_TOKENS)
        answers.append({"prompt_ids": prompt_ids, "token_ids": longer.token_ids, "accepted": accepted})
    told = {"eos_ids": [1], "answers": answers, "layer_ids": list(LAYER_IDS), "parted": None}
    write_json(folder / "answers.json", told)
    return folder


Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs the command with settings and stand-ins changed; returns serving.json, also where it failed.

    Of `told`, what the stand-ins' file holds, and of `speculation`, their flag.
    """

    def run(
        told: dict[str, Any] | None = None, speculation: dict[str, Any] | None = None, **settings: Any
    ) -> dict[str, Any]:
        answers = tmp_path / "answers.json"
        write_json(answers, read_json(build / "answers.json") | (told or {}))
        plain = f"{{python}} {FAKE} --port {{port}} --model {{model}} --answers {answers}"
        values = {
            "python": sys.executable,
            "command": plain,
            "draft_tokens": DRAFT_TOKENS,
            "prompts_per_dataset": 3,
            "max_new_tokens": NEW_TOKENS,
            "rounds": 2,
            "threads": 1,
            "ready_timeout": 60,
        }
        if speculation is not None:
            values["drafted_command"] = f"{plain} --speculative-config '{json.dumps(speculation)}'"
        command = ["serve_check.py", "--checkpoint", "checkpoint", "--tokenized", "rows.jsonl"]
        command += ["--target", "target.json", "--target-path", "target"]
        command += ["--settings", json.dumps(values | settings), "--out", str(tmp_path / "serving.json")]
        if (build / "evaluation.json").exists():
            command += ["--evaluation", "evaluation.json"]
        monkeypatch.chdir(build)
        monkeypatch.setattr(sys, "argv", command)
        try:
            serve_check.main()
        except BuildError as error:
            if not (tmp_path / "serving.json").exists():
                raise
            return read_json(tmp_path / "serving.json") | {"words": str(error)}
        return read_json(tmp_path / "serving.json") | {"words": ""}

    return run


def left_running(folder: Path) -> str:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in listed.splitlines() if str(folder) in line)


def test_a_drafter_that_is_served_right_passes(check: Check, tmp_path: Path) -> None:
    figures = check()
    assert figures["passed"] and figures["findings"] == [] and figures["words"] == ""
    lengths = figures["acceptance_length"]
    assert lengths["server"] == lengths["eyrie"] > 1.0 and lengths["relative_difference"] == 0.0
    rates = figures["acceptance_by_position"]
    assert rates["server"] == rates["eyrie"] and len(rates["server"]) == DRAFT_TOKENS
    assert 1 + sum(rates["server"]) == pytest.approx(lengths["server"])
    counters = figures["counters"]
    assert counters["draft_tokens"] == DRAFT_TOKENS * counters["drafts"]
    # Two rounds: each prompt counts twice, the requests before them not at all.
    stored = read_json(tmp_path / "answers.json")["answers"]
    assert counters["accepted_tokens"] == 2 * sum(sum(one["accepted"]) for one in stored)
    assert figures["identical_outputs"] == {"equal": 6, "total": 6, "differences": []}
    assert figures["outputs_as_eyrie"] == {"equal": 6, "total": 6}
    assert figures["reported"]["algorithm"] == "EAGLE3"
    assert figures["reported"]["layer_ids"] == list(LAYER_IDS) and figures["reported"]["hidden_width"] == 48
    assert len(figures["rounds"]) == 2 and figures["speed_up"] > 0
    assert "--speculative-config" in figures["engine"]["command"]
    assert "--speculative-config" not in figures["engine"]["command_plain"]
    assert left_running(tmp_path) == ""


def test_the_method_of_eagle_1_is_named_and_nothing_is_left(check: Check, tmp_path: Path) -> None:
    flag = {"method": "eagle", "model": "checkpoint", "num_speculative_tokens": DRAFT_TOKENS}
    with pytest.raises(IdentityError, match=r"(?s)another speculation.*EAGLE\n.*EAGLE3.*speculative-config"):
        check(speculation=flag)
    assert left_running(tmp_path) == ""


def test_an_answer_that_differs_is_told_with_place_and_margin(check: Check) -> None:
    figures = check({"parted": 4}, rounds=1)
    (one,) = figures["identical_outputs"]["differences"]
    assert (one["id"], one["position"], one["margin"]) == ("codes-1", 3, 1.25)
    assert figures["identical_outputs"]["equal"] == 5
    assert not figures["passed"] and "from token 3 on" in figures["words"]


def test_acceptance_of_exactly_one_is_named_with_its_causes(build: Path, check: Check) -> None:
    stored = read_json(build / "answers.json")["answers"]
    figures = check({"answers": [one | {"accepted": [0] * len(one["accepted"])} for one in stored]}, rounds=1)
    assert figures["acceptance_length"]["server"] == 1.0
    (finding,) = figures["findings"]
    assert (
        finding.index("EAGLE") < finding.index("lm_head") < finding.index("d2t") < finding.index("layer ids")
    )
    assert "it is how the server reads it" in finding


def test_another_acceptance_and_other_layers_are_named(build: Path, check: Check) -> None:
    stored = read_json(build / "answers.json")["answers"]
    more = [one | {"accepted": [min(3, count + 1) for count in one["accepted"]]} for one in stored]
    figures = check({"answers": more, "layer_ids": [0, 1, 3]}, rounds=1)
    assert ["captures layers [0, 1, 3]" in one for one in figures["findings"]] == [True, False]
    assert "is allowed" in figures["findings"][1]


def test_a_drafter_that_is_not_what_was_evaluated_is_named(build: Path, check: Check) -> None:
    """Without training.json nothing tells what was written: what it does still does."""
    (build / "checkpoint/training.json").rename(build / "training.json")
    write_json(build / "evaluation.json", {"acceptance_length": {"3": {"all": 3.5}}})
    try:
        assert "evaluation.json tells 3.500" in check(rounds=1)["words"]
    finally:
        (build / "evaluation.json").unlink()
        (build / "training.json").rename(build / "checkpoint/training.json")


def test_a_fault_of_the_files_stops_it_before_a_server_starts(build: Path, check: Check) -> None:
    path = build / "checkpoint/model.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    blocks = tensors["fc.weight"].chunk(3, dim=1)
    swapped = torch.cat([blocks[1], blocks[0], blocks[2]], dim=1)
    save_file(tensors | {"fc.weight": swapped}, path)
    try:
        with pytest.raises(GateError, match=r"(?s)no server was started.*fc.weight.*another order"):
            check(command="/nowhere/python {port}")
    finally:
        path.write_bytes(before)


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 24.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7960937171595764e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 48.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1.0
"""


def test_counts_are_read_as_vllm_writes_them_and_added_over_engines() -> None:
    assert parse_counters(METRICS) == Counters(24, 48, 5, (4, 1))
    assert parse_counters(METRICS + METRICS.replace('engine="0"', 'engine="1"')) == Counters(
        48, 96, 10, (8, 2)
    )
    assert parse_counters("vllm:num_requests_running 0.0\n") is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 29))
def test_counts_of_a_part_and_the_rest_make_the_whole(accepted: list[int], cut: int) -> None:
    whole, part = of_cycles(accepted, 4), of_cycles(accepted[:cut], 4)
    assert whole.since(part) == of_cycles(accepted[cut:], 4)
    assert whole.acceptance_length() == pytest.approx(1 + sum(whole.rates()))


def test_counts_are_read_until_they_stand_still() -> None:
    readings = iter([of_cycles([1], 2), of_cycles([1, 2], 2), of_cycles([1, 2], 2), of_cycles([0] * 9, 2)])
    assert settled(lambda: next(readings), pause=0.0) == of_cycles([1, 2], 2)


def test_layers_are_those_of_the_latest_start() -> None:
    line = "[gpu_model_runner.py:5243] Using auxiliary layers from speculative config: ({})\n"
    assert captured_layers(line.format("2, 15, 27") + line.format("3, 4, 5")) == [3, 4, 5]
    assert captured_layers("Loading weights took 1.26 seconds") is None


def a_good_report(**changes: Any) -> dict[str, Any]:
    return {
        "engine": {"dtype": "float32"},
        "draft_tokens": 3,
        "acceptance_length": {"server": 2.0, "eyrie": 2.01},
        "reported": {
            "algorithm": "EAGLE3",
            "draft_tokens": 3,
            "drafter": os.getcwd(),
            "layer_ids": [1, 2, 3],
        },
        "identical_outputs": {"equal": 2, "total": 2, "differences": []},
        "outputs_as_eyrie": {"equal": 2, "total": 2},
    } | changes


@pytest.mark.parametrize(
    ("changes", "evaluated", "words"),
    [
        ({}, 2.0, None),
        ({"acceptance_length": {"server": 2.0, "eyrie": 1.95}}, None, None),
        ({"acceptance_length": {"server": 2.0, "eyrie": 1.9}}, None, r"\+5.3%"),
        ({"acceptance_length": {"server": None, "eyrie": 1.9}}, None, "drafted nothing"),
        ({"acceptance_length": {"server": 1.0, "eyrie": 1.0}}, None, "it is the checkpoint"),
        ({"acceptance_length": {"server": 1.2, "eyrie": 1.2}}, 1.8, "not the weights that were evaluated"),
        ({"outputs_as_eyrie": {"equal": 0, "total": 2}}, None, "another target"),
        ({"outputs_as_eyrie": {"equal": 0, "total": 2}, "engine": {"dtype": "bfloat16"}}, None, None),
    ],
)
def test_findings(changes: dict[str, Any], evaluated: float | None, words: str | None) -> None:
    found = findings(a_good_report(**changes), [1, 2, 3], Path.cwd(), 0.03, evaluated)
    if words is None:
        assert found == []
    else:
        assert len(found) == 1
        assert re.search(words, found[0])


def test_in_bfloat16_a_difference_is_listed_and_no_finding() -> None:
    difference = {"id": "a", "dataset": "b", "position": 4, "margin": 0.06}
    equality = {"equal": 1, "total": 2, "differences": [difference]}
    figures = a_good_report(identical_outputs=equality, engine={"dtype": "bfloat16"})
    assert findings(figures, [1, 2, 3], Path.cwd(), 0.03, None) == []
    figures["engine"] = {"dtype": "float32"}
    assert len(findings(figures, [1, 2, 3], Path.cwd(), 0.03, None)) == 1
