"""The whole chain on the tiny target, through Snakemake: what it makes, what it redoes, what stops it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from workspace import TINY, Workspace, jobs_of, tiny_workspace

pytestmark = pytest.mark.build

DATASETS = ["kimi_native", "openthoughts", "sharegpt", "swe_agent"]
ROWS = ["build_prompts", "answer_prompts", "capture_states"]
AFTER = {
    (rule, "")
    for rule in (
        "build_vocabulary",
        "train_drafter",
        "evaluate_drafter",
        "estimate_acceptance",
        "build_report",
        "write_card",
    )
}


@pytest.fixture
def copied(built: Workspace, tmp_path: Path) -> Workspace:
    """A finished tiny build of the test's own."""
    return built.copy(tmp_path / "copy")


def test_the_whole_chain_is_there(built: Workspace) -> None:
    results = built.results()
    for dataset in DATASETS:
        kind = "conversations" if dataset == "kimi_native" else "prompts"
        for name in (
            f"raw/{dataset}/source.json",
            f"prompts/{dataset}/{kind}.jsonl",
            f"prompts/{dataset}/ledger.json",
            f"prompts/{dataset}/rejects.jsonl",
            f"tiny/tokenized/{dataset}/tokenized_data.jsonl",
            f"tiny/tokenized/{dataset}/ledger.json",
            f"tiny/hidden_states/{dataset}/manifest.json",
        ):
            assert results[name] is not None
    evaluation = json.loads(results["tiny/drafter/evaluation.json"])
    assert evaluation["identical_outputs"]["equal"] == evaluation["identical_outputs"]["total"] > 0
    assert set(evaluation["acceptance_length"]) == {"3", "5"}
    assert evaluation["tokens_per_second"] is evaluation["pays"] is None
    acceptance = json.loads(results["tiny/drafter/acceptance.json"])
    assert set(acceptance["walk"]["3"]["greedy"]["datasets"]) == set(DATASETS)
    assert results["tiny/report.html"].startswith(b"<!")


def test_rows_add_up_from_file_to_sample(built: Workspace) -> None:
    for dataset in DATASETS:
        read = json.loads(built.read(f"work/prompts/{dataset}/ledger.json"))
        answered = json.loads(built.read(f"work/tiny/tokenized/{dataset}/ledger.json"))
        rows = [
            json.loads(line)
            for line in built.read(f"work/tiny/tokenized/{dataset}/tokenized_data.jsonl").split("\n")[:-1]
        ]
        manifest = json.loads(built.read(f"work/tiny/hidden_states/{dataset}/manifest.json"))
        assert read["in"] == read["kept"] + sum(read["skipped"].values())
        assert read["kept"] == answered["in"] == answered["kept"] + sum(answered["skipped"].values())
        assert [row["id"] for row in rows] == [sample["id"] for sample in manifest["samples"]]
        assert len(rows) == answered["kept"]


def test_a_finished_build_has_nothing_to_do(built: Workspace) -> None:
    assert built.plan() == set()
    assert "Nothing to be done" in built.build()


def test_evidence_makes_the_report_stale_and_is_not_needed(copied: Workspace) -> None:
    scaling = copied.folder / "work/tiny/scaling/scaling.json"
    scaling.parent.mkdir()
    scaling.write_text("{}")
    assert copied.plan() == {("build_report", "")}
    scaling.unlink()
    assert copied.plan() == set()


def test_snakemake_makes_its_own_report(copied: Workspace) -> None:
    copied.build("--report", "build-report.html")
    page = copied.read("build-report.html")
    assert "one page with" in page
    for name in ("report.html", "evaluation.json", "training.json"):
        assert name in page


def test_a_dataset_is_a_target_of_its_own(built: Workspace, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fresh = Workspace.clone(tmp_path / "empty")
    shutil.copytree(built.folder / "models", fresh.folder / "models")
    chain = jobs_of("openthoughts", ["fetch_raw", *ROWS]) | {("identify_target", "")}
    assert fresh.plan("openthoughts") == chain


def touch(workspace: Workspace) -> None:
    for path in [*workspace.folder.glob("samples/*.*"), *workspace.folder.rglob("scripts/**/*.py")]:
        os.utime(path)


def reorder(workspace: Workspace) -> None:
    path = workspace.folder / TINY
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["datasets"] = dict(reversed(data["datasets"].items()))
    path.write_text(yaml.safe_dump(dict(reversed(data.items())), sort_keys=False), encoding="utf-8")


def change_raw_bytes(workspace: Workspace) -> None:
    path = workspace.folder / "samples/sharegpt.json"
    path.write_bytes(path.read_bytes() + b"\n")


def replace(name: str, old: str, new: str) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.edit(name, old, new)


def append_comment(name: str) -> Callable[[Workspace], None]:
    def edit(workspace: Workspace) -> None:
        with (workspace.folder / name).open("a", encoding="utf-8") as file:
            file.write("\n# A comment.\n")

    return edit


OPENTHOUGHTS = jobs_of("openthoughts", ROWS) | AFTER
ALL_ANSWERS = (
    {("answer_prompts", name) for name in DATASETS if name != "kimi_native"}
    | {("tokenize_conversations", "kimi_native")}
    | {("capture_states", name) for name in DATASETS}
    | AFTER
)
EDITS = {
    "touched files": (touch, set()),
    "the order of keys": (reorder, set()),
    "the batch size": (replace(TINY, "batch_size: 8", "batch_size: 3"), set()),
    "how often training is saved": (replace(TINY, "checkpoint_every: 5", "checkpoint_every: 50"), set()),
    "raw bytes": (change_raw_bytes, jobs_of("sharegpt", ["fetch_raw", *ROWS]) | AFTER),
    "a dataset's entry": (
        replace(TINY, "layout: sharegpt\n", "layout: sharegpt\n    prompt: system_and_first_user\n"),
        OPENTHOUGHTS,
    ),
    "`from` in the layout of one dataset": (
        replace("scripts/eyrie/layouts/sharegpt.py", '"from"', '"From"'),
        OPENTHOUGHTS,
    ),
    "a comment in the layout of no dataset": (
        append_comment("scripts/eyrie/layouts/preference.py"),
        set(),
    ),
    "the layers": (
        replace(TINY, "layer_ids: [1, 3, 5]", "layer_ids: [1, 2, 3]"),
        {("capture_states", name) for name in DATASETS} | (AFTER - {("build_vocabulary", "")}),
    ),
    "one partition's sampling": (
        replace(TINY, "long: {max_new_tokens: 24}", "long: {max_new_tokens: 23}"),
        jobs_of("swe_agent", ["answer_prompts", "capture_states"]) | AFTER,
    ),
    "the split": (replace(TINY, "validation: 0.1,", "validation: 0.2,"), ALL_ANSWERS),
    "the draft vocabulary's size": (replace(TINY, "draft_vocab_size: 256", "draft_vocab_size: 128"), AFTER),
    "the learning rate": (
        replace(TINY, "epochs: 2", "epochs: 2\n  learning_rate: 1.0e-3"),
        AFTER - {("build_vocabulary", "")},
    ),
    "the evaluation": (
        replace(TINY, "prompts_per_dataset: 2", "prompts_per_dataset: 1"),
        {("evaluate_drafter", ""), ("build_report", ""), ("write_card", "")},
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_makes_stale_what_depends_on_it_and_nothing_else(copied: Workspace, name: str) -> None:
    edit, expected = EDITS[name]
    edit(copied)
    assert copied.plan() == expected


def test_a_layout_edit_that_changes_nothing_costs_no_answer(copied: Workspace) -> None:
    before, answers = copied.results(), copied.journal_lines()
    append_comment("scripts/eyrie/layouts/sharegpt.py")(copied)
    said = copied.build()
    assert "answer_prompts" in said
    # The ledger tells which code made the rows.
    ledger = "prompts/openthoughts/ledger.json"
    after = copied.results()
    codes = [json.loads(results.pop(ledger)).pop("code") for results in (before, after)]
    assert codes[0] != codes[1]
    assert after == before
    assert copied.journal_lines() == answers


def test_a_build_killed_while_answering_ends_as_an_undisturbed_one(built: Workspace, tmp_path: Path) -> None:
    killed = tiny_workspace(tmp_path)
    # What changes no result is different, too: batches, and how many jobs run side by side.
    killed.edit(TINY, "batch_size: 8", "batch_size: 3")
    killed.build_until(lambda: sum(map(len, killed.journal_lines().values())) >= 5, "responses")
    before = killed.journal_lines()
    locked = killed.build(check=False)
    assert "LockException" in locked or "locked" in locked
    killed.run("scripts/unlock.py")
    killed.build("--cores", "1")
    for name, lines in before.items():
        assert killed.journal_lines()[name][: len(lines)] == lines
    answered = [line.split(b'"')[3] for lines in killed.journal_lines().values() for line in lines]
    prompts = sum(
        json.loads(built.read(f"work/prompts/{name}/ledger.json"))["kept"]
        for name in DATASETS
        if name != "kimi_native"
    )
    assert len(answered) == len(set(answered)) == prompts
    # The configuration as it was run is written down as it was.
    results, undisturbed = killed.results(), built.results()
    assert results.pop("config.json") != undisturbed.pop("config.json")
    assert results == undisturbed


def test_unlock_refuses_while_a_build_runs(copied: Workspace) -> None:
    (copied.folder / ".snakemake/locks").mkdir(parents=True, exist_ok=True)
    (copied.folder / ".snakemake/locks/0.output.lock").write_text("work/x\n")
    (copied.folder / "scripts/sleep.py").write_text("import time\ntime.sleep(60)\n")
    with subprocess.Popen([sys.executable, "scripts/sleep.py"], cwd=copied.folder) as process:
        refused = copied.run("scripts/unlock.py", check=False)
        process.kill()
    assert refused.returncode != 0
    assert str(process.pid) in refused.stderr
    assert (copied.folder / ".snakemake/locks/0.output.lock").exists()
    copied.run("scripts/unlock.py")
    assert not list((copied.folder / ".snakemake/locks").glob("*"))


def test_scaling_trains_on_shares_and_leaves_the_builds_own_drafter(copied: Workspace) -> None:
    assert copied.plan("scaling") == {
        ("train_share", ""),
        ("estimate_share", ""),
        ("fit_scaling", ""),
    }
    before = copied.results()
    copied.build("scaling")
    results = copied.results()
    assert {name: results[name] for name in before} == before
    found = json.loads(results["tiny/scaling/scaling.json"])
    assert [point["share"] for point in found["points"]] == ["1/8", "1/4", "1/2", "1"]
    whole = json.loads(before["tiny/drafter/acceptance.json"])["walk"]["3"]["greedy"]["all"]
    assert found["points"][-1]["acceptance_length"] == pytest.approx(whole["acceptance_length"])
    training = json.loads(before["tiny/drafter/checkpoint/training.json"])
    assert found["points"][-1]["groups"] == training["train_groups"]
    assert "group_share" not in training["recipe"], "the whole is no share: its key is what it was"
    assert found["points"][0]["groups"] < training["train_groups"] / 3
    assert copied.plan("scaling") == set()


def no_usable_rows(workspace: Workspace) -> None:
    """Three datasets, each broken in its own way; the fourth's rows are to be built anew."""
    empty = [{"id": f"{number}_0", "conversations": []} for number in range(7)]
    (workspace.folder / "samples/sharegpt.json").write_text(json.dumps(empty), encoding="utf-8")
    turns = [[{"from": "oracle", "value": f"question {number}"}] for number in range(7)]
    questions = pa.table({"system": [""] * 7, "conversations": turns})
    pq.write_table(questions, workspace.folder / "samples/openthoughts.parquet")
    steps = [[{"role": "user", "text": "an issue", "system_prompt": None}]] * 7
    issues = pa.table({"instance_id": [str(number) for number in range(7)], "steps": steps})
    pq.write_table(issues, workspace.folder / "samples/swe_agent.parquet")
    shutil.rmtree(workspace.folder / "work/prompts/kimi_native")


def test_a_file_without_usable_rows_stops_its_dataset_and_no_other(copied: Workspace) -> None:
    no_usable_rows(copied)
    said = copied.build(check=False)
    lines = copied.read(TINY).splitlines()
    for file, seen, dataset, layout in (
        ("sharegpt.json", "7 empty_conversation", "sharegpt", "sharegpt_chunks"),
        ("openthoughts.parquet", "7 unknown_role:oracle", "openthoughts", "sharegpt"),
        ("swe_agent.parquet", "7 missing_column:trajectory", "swe_agent", "trajectory"),
    ):
        line = lines.index(f"    layout: {layout}") + 1
        for words in (file, seen, "expected", f"tiny.yaml:{line} datasets.{dataset}.layout"):
            assert words in said, f"{words!r} is not in\n{said}"
        assert not (copied.folder / f"work/prompts/{dataset}/prompts.jsonl").exists()
    assert (copied.folder / "work/prompts/kimi_native/conversations.jsonl").exists()
    assert (copied.folder / "work/tiny/hidden_states/kimi_native/manifest.json").exists()


def test_mistakes_in_the_configuration_are_told_before_anything_runs(copied: Workspace) -> None:
    copied.edit(TINY, "engine:\n", "engine:\n  thread: 2\n")
    said = copied.build(check=False)
    assert "unknown key 'thread'; did you mean threads?" in said


def test_a_wrong_number_of_rows_in_all_stops_before_training(copied: Workspace) -> None:
    copied.edit(TINY, "datasets:\n", "expected_samples: {prompts: 64}\n\ndatasets:\n")
    planned = {rule for rule, _ in copied.plan()}
    assert "check_selection" in planned
    assert planned.isdisjoint({"build_prompts", "answer_prompts", "tokenize_conversations", "capture_states"})
    copied.build("prompts")
    kept = json.loads(copied.read("work/prompts/selection.json"))["kept"]["prompts"]
    assert kept == {"openthoughts": 24, "sharegpt": 24, "swe_agent": 16}
    # Another number repeats the comparison alone; what follows only waits for it.
    copied.edit(TINY, "{prompts: 64}", "{prompts: {max: 64}}")
    assert copied.plan("prompts") == {("check_selection", "")}
    copied.edit(TINY, "{prompts: {max: 64}}", "{prompts: {min: 1000}}")
    copied.edit(TINY, "    samples: 24\n", "")
    said = copied.build("prompts", check=False)
    assert "selected rows of kind prompts\n  seen: 205: openthoughts 91, sharegpt 98, swe_agent 16" in said


def test_a_licence_that_is_not_allowed_stops_before_anything_runs(copied: Workspace) -> None:
    copied.edit(TINY, "datasets:\n", "licences: [MIT]\n\ndatasets:\n")
    said = copied.build(check=False)
    assert (
        "datasets.openthoughts.licence: saw 'Apache-2.0', expected one of the allowed licences: MIT" in said
    )


def test_the_full_build_is_planned_without_the_target_or_the_data(tmp_path: Path) -> None:
    jobs = Workspace.clone(tmp_path).plan(config="configs/kimi-k2.5.yaml")
    assert len(jobs) == 1 + 10 * 4 + 1 + 6
    assert ("answer_prompts", "swe_agent") in jobs
    assert ("tokenize_conversations", "deepswe_kimi") in jobs
