"""What a plan counts, and what it only assumes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eyrie.config import Config, parse_config
from eyrie.config_files import read_config_of
from eyrie.planning import Assumptions, Figure, Source, gpus_of, measured_rate, plan_build
from eyrie.recipes import ANSWERING_VERSION, answers_recipe
from eyrie.records import content_key
from plan_build import told
from workspace import Workspace

USUAL = Assumptions(prompt_tokens=100, answer_tokens=1_000, native_tokens=3_000)
TARGET = {"revision": "r", "template_sha256": "t", "hidden_size": 64}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def tiny(root: Path, tmp_path: Path) -> Config:
    data = yaml.safe_load((root / "configs/tiny.yaml").read_text())
    target = {**data["target"], "path": tmp_path / "no-model"}
    return parse_config({**data, "work": tmp_path / "work", "target": target})


def test_the_kimi_build_is_planned_before_anything_is_there(root: Path, tmp_path: Path) -> None:
    data = yaml.safe_load((root / "configs/kimi-k2.5.yaml").read_text())
    config = parse_config({**data, "work": tmp_path / "work"})
    plan = plan_build(config, USUAL)
    rows, requests = plan.total("rows"), plan.total("requests")
    assert (rows.value, rows.source) == (88_088, Source.CONFIGURED)
    assert (requests.value, requests.source) == (83_288, Source.CONFIGURED)
    tokens = plan.total("answer_tokens")
    assert (tokens.value, tokens.source) == (83_288 * 1_000, Source.ASSUMED)
    assert (plan.bytes_per_token, plan.bytes_on_the_way, plan.gpus) == (22_296, 35_856, 8)
    asked, native = 83_288 * 1_100, 4_800 * 3_000
    needed = plan.state_bytes()
    assert needed is not None and needed.value == (asked + native) * 22_296 + asked * 35_856
    assert plan.rate is None and plan.hours() is None
    assert plan.hours(1_000.0) == pytest.approx(83_288 / 3_600)
    lines = "\n".join(told(plan))
    assert "~83,288,000 tokens; no rate was measured here yet" in lines
    assert "DOES NOT FIT" in lines


@pytest.mark.build
def test_the_command_plans_the_kimi_build_on_its_profile(tmp_path: Path) -> None:
    """Jobs and reasons as Snakemake has them, then the figures; the profile is read."""
    words = ["--profile", "profiles/gpu-host", "--configfile", "configs/kimi-k2.5.yaml"]
    done = subprocess.run(
        [sys.executable, "scripts/plan_build.py", "--", *words],
        # A folder without results, whatever was built in this one.
        cwd=Workspace.clone(tmp_path).folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "output files have to be generated" in said and "capture_states               10" in said
    assert re.search(r"in all +88,088 +0 +83,288 ", said)


def test_what_is_done_is_counted_and_not_planned_again(tiny: Config) -> None:
    work, build = tiny.work, tiny.work / tiny.target.name
    before = plan_build(tiny, USUAL)
    assert {one.done for one in before.datasets} == {"nothing"}
    assert before.total("requests").value == 24 + 24 + 16
    write(build / "target.json", TARGET)
    write(work / "prompts/openthoughts/ledger.json", {"kept": 20})
    write(work / "prompts/sharegpt/ledger.json", {"kept": 24})
    write(build / "tokenized/sharegpt/ledger.json", {"tokens": {"train": 900, "held_out": 100}})
    write(build / "hidden_states/sharegpt/manifest.json", {})
    recipe = answers_recipe(TARGET, ANSWERING_VERSION, tiny.partitions["short"])
    journal = work / "store/answers" / content_key(recipe) / "openthoughts.jsonl"
    journal.parent.mkdir(parents=True)
    lines = [json.dumps({"key": str(number), "token_ids": [1] * 6}) + "\n" for number in range(15)]
    journal.write_text("".join(lines) + '{"key": "torn')
    plan = {one.name: one for one in plan_build(tiny, USUAL).datasets}
    asked, done = plan["openthoughts"], plan["sharegpt"]
    assert (asked.done, asked.answered, str(asked.requests)) == ("selected", 15, "5")
    assert asked.answer_tokens == Figure(5 * 6, Source.COUNTED)
    assert asked.capture_tokens == Figure(20 * (100 + 6), Source.ASSUMED)
    assert (done.done, done.requests.value, done.capture_tokens.value) == ("captured", 0, 0)


def test_the_rate_is_that_of_earlier_runs(tiny: Config) -> None:
    logs = tiny.work / "logs" / "answer_prompts"
    assert measured_rate(tiny) is None
    write(logs / "a.progress.json", {"tokens": 900, "seconds": 9.0})
    (logs / "a.log").write_text("")
    (logs / "b.log").write_text(
        "answer_prompts: done: 3 answers, 100 tokens in 1.0 s, 100 tokens/s, 0 without"
    )
    # Found all in the store: says nothing about a rate.
    write(logs / "c.progress.json", {"tokens": 0, "seconds": 1.0})
    (logs / "c.log").write_text("")
    assert measured_rate(tiny) == pytest.approx(100.0)
    assert plan_build(tiny, USUAL, rate=7.0).rate == 7.0


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [("", 0), ("--tensor-parallel-size 8", 8), ("--tp-size=4 --dp-size 2", 8), ("--tp 2 --tp-x 9", 2)],
)
def test_gpus_are_those_that_the_command_asks_for(tiny: Config, flags: str, gpus: int) -> None:
    engine = tiny.engine.model_copy(update={"kind": "vllm", "command": f"serve --port {{port}} {flags}"})
    assert gpus_of(tiny.model_copy(update={"engine": engine})) == gpus


@given(st.lists(st.tuples(st.floats(0, 1e9), st.sampled_from(Source))))
def test_a_sum_is_as_good_as_its_worst_part(parts: list[tuple[float, Source]]) -> None:
    total = sum((Figure(*part) for part in parts), Figure(0, Source.COUNTED))
    assert total.source == max([source for _, source in parts], default=Source.COUNTED)
    assert total.value == pytest.approx(sum(value for value, _ in parts))


def test_the_configuration_is_found_in_snakemakes_words(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    words = "--cores all --profile p --configfile config.yaml configs/vllm.yaml --config work=elsewhere -n"
    config = read_config_of(words.split())
    assert (str(config.work), config.engine.kind) == ("elsewhere", "vllm")
    assert read_config_of(["--cores", "1", "openthoughts"]).engine.kind == "in_process"
