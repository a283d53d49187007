"""The way back from a drafter to its sources: each kind of change is named, none on an unchanged build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyrie import trace
from eyrie.config import parse_config
from eyrie.recipes_now import differences
from eyrie.records import RecordError, read_json
from workspace import TINY, Workspace

pytestmark = pytest.mark.build

CHECKPOINT = Path("work/tiny/drafter/checkpoint")


def changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Any], None] | None = None
) -> list[str]:
    """What a walk finds in the folder, with an edit of the last run's configuration."""
    monkeypatch.chdir(folder)
    config = read_json(Path("work/config.json"))
    if edit is not None:
        edit(config)
    return [f"{name}: {change}" for name, change in trace.walk(CHECKPOINT, parse_config(config)).changes()]


def test_an_unchanged_build_is_traced_to_every_source(
    built: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert changes(built.folder, monkeypatch) == []
    walked = trace.walk(CHECKPOINT, parse_config(read_json(Path("work/config.json"))))
    assert {node.name for node in walked.nodes.values() if node.kind == "file"} == {
        *(f"{CHECKPOINT}/{name}" for name in ("config.json", "model.safetensors")),
        *(
            f"work/raw/{name}"
            for name in (
                "kimi_native/kimi_native.jsonl",
                "openthoughts/openthoughts.parquet",
                "sharegpt/sharegpt.json",
                "swe_agent/swe_agent.parquet",
            )
        ),
        *(f"models/tiny/{name}" for name in read_json(Path("work/tiny/target.json"))["files"]),
    }
    assert all(node.digest for node in walked.nodes.values() if node.name != walked.root)
    shown = [node.name for _, node in walked.tree()]
    assert sorted(shown) == sorted(walked.nodes), "each once"


def test_without_looking_the_records_are_told(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(built.folder)
    monkeypatch.setattr(trace, "sha256_file", lambda path: pytest.fail(f"{path} was read"))
    assert (
        len(trace.walk(CHECKPOINT, parse_config(read_json(Path("work/config.json"))), look=False).nodes) > 20
    )


def append(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(b" ")

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


TOKENIZED = "work/tiny/tokenized/sharegpt/tokenized_data.jsonl"
# What is done to a finished build, and all that is then named.
FILES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "the weights": (
        append(f"{CHECKPOINT}/model.safetensors"),
        [f"{CHECKPOINT}/training.json: {CHECKPOINT}/model.safetensors has changed"],
    ),
    "a source": (
        append("samples/sharegpt.json"),
        ["work/raw/sharegpt/source.json: samples/sharegpt.json has changed since it was fetched"],
    ),
    "a missing source": (
        remove("samples/sharegpt.json"),
        ["work/raw/sharegpt/source.json: the original of sharegpt.json is gone"],
    ),
    "a raw copy": (
        append("work/raw/sharegpt/sharegpt.json"),
        ["work/raw/sharegpt/source.json: work/raw/sharegpt/sharegpt.json has changed"],
    ),
    "the target": (
        append("models/tiny/config.json"),
        ["work/tiny/target.json: models/tiny/config.json has changed"],
    ),
    "samples made anew": (
        append(TOKENIZED),
        [
            f"{CHECKPOINT}/training.json: {TOKENIZED} was made anew",
            f"work/tiny/hidden_states/sharegpt/manifest.json: {TOKENIZED} was made anew",
            f"work/tiny/drafter/vocabulary.json: {TOKENIZED} was made anew",
        ],
    ),
    "prompts that are gone": (
        remove("work/prompts/sharegpt/prompts.jsonl"),
        [f"{TOKENIZED}: work/prompts/sharegpt/prompts.jsonl is gone"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_each_changed_file_is_named(
    built: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    copied = built.copy(tmp_path / "copy")
    change, expected = FILES[name]
    change(copied.folder)
    found = changes(copied.folder, monkeypatch)
    assert len(found) == len(expected)
    assert [one for one in expected if not any(said.startswith(one) for said in found)] == []


def set_key(*path: str, value: object) -> Callable[[Any], None]:
    def edit(config: Any) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return edit


SETTINGS: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "a dataset's entry": (
        set_key("datasets", "sharegpt", "samples", value=23),
        ["work/prompts/sharegpt/prompts.jsonl: samples was 24 when this was made, and is 23"],
    ),
    "sampling": (
        set_key("partitions", "long", "temperature", value=0.5),
        ["work/tiny/tokenized/swe_agent/tokenized_data.jsonl: sampling.temperature was 0.0"],
    ),
    "training": (
        set_key("training", "learning_rate", value=0.1),
        [f"{CHECKPOINT}/training.json: training.learning_rate was"],
    ),
    "the draft vocabulary": (
        set_key("drafter", "draft_vocab_size", value=255),
        [
            f"{CHECKPOINT}/training.json: drafter.draft_vocab_size was 256",
            "work/tiny/drafter/vocabulary.json: draft_vocab_size was 256",
        ],
    ),
    "how often training is saved": (set_key("training", "checkpoint_every", value=50), []),
    "how many requests run at once": (set_key("partitions", "long", "max_in_flight", value=3), []),
    "a dataset less": (
        lambda config: config["datasets"].pop("sharegpt"),
        ["work/raw/sharegpt/source.json: dataset sharegpt is not in the configuration any more"],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_changed_setting_is_named(built: Workspace, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    edit, expected = SETTINGS[name]
    found = changes(built.folder, monkeypatch, edit)
    assert len(found) == len(expected)
    assert [one for one in expected if not any(said.startswith(one) for said in found)] == []


def test_a_new_dataset_is_named(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(config: Any) -> None:
        config["datasets"]["more"] = config["datasets"]["sharegpt"]

    assert changes(built.folder, monkeypatch, add) == [
        f"{CHECKPOINT}/training.json: dataset more is in the configuration, but not in this drafter"
    ]


def test_other_code_and_versions_are_named(built: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "code_digest", lambda script, layout: f"other-{script}-{layout}")
    monkeypatch.setattr(trace, "__version__", "0.2.0")
    found = changes(built.folder, monkeypatch)
    assert sum(said.endswith("the code that makes it has changed") for said in found) == 4
    assert any("eyrie was 0.1.0 when" in said and said.endswith("0.2.0 now") for said in found)
    assert len(found) == 5


def test_the_command_says_what_and_ends_so(built: Workspace, tmp_path: Path) -> None:
    command = ("scripts/trace.py", str(CHECKPOINT))
    same = built.run(*command)
    assert "nothing has changed since" in same.stdout
    assert "compared with the configuration in work/config.json" in same.stdout
    copied = built.copy(tmp_path / "copy")
    copied.edit(TINY, "long: {max_new_tokens: 24}", "long: {max_new_tokens: 23}")
    other = copied.run(*command, "--config", TINY, "--json", check=False)
    assert other.returncode == 1
    document = json.loads(other.stdout)
    assert [one["change"].split(" was ")[0] for one in document["changes"]] == ["sampling.max_new_tokens"]
    (copied.folder / CHECKPOINT / "training.json").write_text("{")
    assert copied.run(*command, check=False).returncode == 2


def test_a_checkpoint_far_from_its_build_is_refused(built: Workspace, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(built.read(f"{CHECKPOINT}/training.json"))
    with pytest.raises(RecordError, match="of these 10 none is there"):
        trace.build_folder(tmp_path)


def test_differences_go_down_to_the_key() -> None:
    before = {"a": {"b": 1, "c": None}, "d": [1]}
    assert list(differences(before, {"a": {"b": 2, "c": None}, "d": [1]})) == [("a.b", "1", "2")]
    assert list(differences(before, {"a": {"b": 1}, "d": [2]})) == [
        ("a.c", "null", "not given"),
        ("d", "[1]", "[2]"),
    ]
