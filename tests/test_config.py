"""The configuration: every mistake gets words, every file is right, and the schema follows the models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyrie.config import Config, ConfigError, config_line, json_schema, parse_config
from eyrie.recipes import answering_recipe, capture_recipe, drafter_recipe, prompts_settings, report_recipe
from eyrie.split import share_of

BUILDS = ["config.yaml", "configs/tiny.yaml", "configs/kimi-k2.5.yaml", "configs/real.yaml"]


def load(root: Path, name: str) -> dict[str, Any]:
    return yaml.safe_load((root / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", BUILDS)
def test_the_committed_builds_are_right(root: Path, name: str) -> None:
    parse_config(load(root, name))


def test_the_schema_is_in_step_with_the_models(root: Path) -> None:
    written = json.loads((root / "schemas/config.schema.json").read_text(encoding="utf-8"))
    assert written == json_schema(), "run `make schema`"


def test_the_kimi_build_is_whole(root: Path) -> None:
    config = parse_config(load(root, "configs/kimi-k2.5.yaml"))
    samples = {name: dataset.samples or 0 for name, dataset in config.datasets.items()}
    native = sum(n for name, n in samples.items() if config.datasets[name].kind == "native")
    assert (len(samples), native, sum(samples.values())) == (10, 4_800, 88_088)
    assert config.hidden_states.layer_ids == [2, 30, 58]
    assert config.partitions["short"].max_new_tokens == 10_240
    assert config.partitions["long"].max_new_tokens == 16_384
    assert config.drafter.draft_vocab_size == 32_000


def test_the_default_build_has_the_ten_datasets(root: Path) -> None:
    default, kimi = (parse_config(load(root, name)) for name in ("config.yaml", "configs/kimi-k2.5.yaml"))
    assert sorted(default.datasets) == sorted(kimi.datasets)
    assert len(default.datasets) == 10


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("datasets.glaive.layuot", "x", "unknown key 'layuot'; did you mean layout?"),
        ("datasets.glaive.source.fromat", "x", "did you mean format?"),
        ("target.dtyp", "float32", "did you mean dtype?"),
        ("training.epochs", 0, "training.epochs: saw 0"),
        ("training.epochs", "many", "saw 'many'"),
        ("datasets.glaive.partition", "medium", "saw 'medium', expected one of long, short"),
        ("datasets.glaive.kind", "native", "native_model goes with kind: native"),
        ("datasets.glaive.source.revision", "main", "expected a commit's hex digits, saw 'main'"),
        ("hidden_states.layer_ids", [3, 2, 1], "expected three layer ids in rising order"),
        ("split.held_out", 0.95, "leave no group to train on"),
        ("datasets.all", "copy of glaive", "expected a name of lower-case letters"),
        ("datasets.Glaive", "copy of glaive", "expected a name of lower-case letters"),
        ("partitions", {}, "partitions: saw {}"),
    ],
)
def test_a_mistake_is_told_in_words(root: Path, path: str, value: Any, words: str) -> None:
    data = load(root, "config.yaml")
    node = data
    *parents, last = path.split(".")
    for part in parents:
        node = node[part]
    node[last] = copy.deepcopy(data["datasets"]["glaive"]) if value == "copy of glaive" else value
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert words in str(caught.value)


def test_a_missing_key_is_named(root: Path) -> None:
    data = load(root, "config.yaml")
    del data["datasets"]["glaive"]["licence"]
    with pytest.raises(ConfigError, match=r"datasets\.glaive\.licence: missing"):
        parse_config(data)


def test_a_key_is_found_by_file_and_line(root: Path, tmp_path: Path) -> None:
    path = root / "config.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    where = config_line(["datasets", "openthoughts", "layout"], [path])
    number = int(where.split(":")[1].split()[0])
    assert lines[number - 1].strip() == "layout: sharegpt"
    # A default stands nowhere: its nearest parent is shown.
    assert config_line(["datasets", "openthoughts", "gates"], [path]).endswith("datasets.openthoughts.gates")
    assert config_line(["a", "b"], [tmp_path / "absent.yaml"]) == "a.b"


def changed(root: Path, **changes: Any) -> Config:
    data = load(root, "config.yaml")
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = data
        for part in parents:
            node = node[part]
        node[last] = value
    return parse_config(data)


def test_a_recipe_holds_what_changes_a_result_and_nothing_else(root: Path) -> None:
    base = changed(root)
    same = changed(
        root, engine__threads=7, engine__batch_size=3, partitions__short__max_in_flight=9, training__threads=2
    )
    for recipe in (capture_recipe, drafter_recipe, report_recipe):
        if recipe is not report_recipe:
            assert recipe(base) == recipe(same)
    assert answering_recipe(base, "glaive") == answering_recipe(same, "glaive")
    assert prompts_settings(base.datasets["glaive"]) == prompts_settings(same.datasets["glaive"])
    warmer = changed(root, partitions__short__temperature=0.5)
    assert answering_recipe(base, "glaive") != answering_recipe(warmer, "glaive")
    assert answering_recipe(base, "swe_agent") == answering_recipe(warmer, "swe_agent")
    assert capture_recipe(base) == capture_recipe(warmer)
    saved_more_often = changed(root, training__checkpoint_every=7)
    assert drafter_recipe(base) == drafter_recipe(saved_more_often)


def test_recipes_do_not_depend_on_the_order_of_keys(root: Path) -> None:
    data = load(root, "config.yaml")
    turned = {key: data[key] for key in reversed(data)}
    turned["datasets"] = dict(reversed(data["datasets"].items()))
    assert report_recipe(parse_config(turned)) == report_recipe(parse_config(data))


def test_shares_are_about_as_large_as_asked_and_stay(root: Path) -> None:
    split = changed(root).split
    shares = [share_of("d", f"group{i}", split) for i in range(4000)]
    assert abs(shares.count("held_out") / 4000 - split.held_out) < 0.02
    assert abs(shares.count("validation") / 4000 - split.validation) < 0.02
    assert shares[:100] == [share_of("d", f"group{i}", split) for i in range(100)]
