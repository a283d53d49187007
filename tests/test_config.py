"""The configuration: every mistake gets words, every file is right, and the schema follows the models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyrie.config import (
    CONFIG_FILES_VARIABLE,
    Config,
    ConfigError,
    CountRange,
    GateSettings,
    config_line,
    json_schema,
    parse_config,
)
from eyrie.recipes import (
    answering_recipe,
    capture_recipe,
    drafter_recipe,
    prompts_settings,
    report_recipe,
    source_settings,
    tokenizing_recipe,
)
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
    expected = {kind: (count.min, count.max) for kind, count in config.expected_by_kind().items()}
    assert expected == {"native": (4_800, 4_800), "prompts": (83_288, 83_288)}
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
        ("datasets.glaive.source.format", "xml", "datasets.glaive.source.format: saw 'xml'"),
        ("datasets.glaive.source.expected_rows", -1, "expected_rows.min: saw -1"),
        ("datasets.glaive.source.expected_rows", {"min": 3, "max": 2}, "min 3 is above max 2"),
        ("datasets.glaive.source.expected_rows", {}, "expected a number, or min or max or both"),
        ("datasets.glaive.source.expected_rows", "many", "expected_rows: saw 'many'"),
        ("datasets.glaive.source.expected_rows", {"mni": 3}, "unknown key 'mni'; did you mean min?"),
        ("datasets.glaive.max_per_group", 3, "max_per_group goes with group_by"),
        ("datasets.kimi_native.turns", "all", "turns goes with kind: prompts"),
        ("datasets.glaive.media", "keep", "datasets.glaive.media: saw 'keep'"),
        ("datasets.glaive.gates", {"on_fail": "go"}, "datasets.glaive.gates.on_fail: saw 'go'"),
        ("datasets.glaive.near_duplicates", {"threshold": 0.1}, "near_duplicates.threshold: saw 0.1"),
        ("datasets.glaive.decontaminate", {}, "datasets.glaive.decontaminate.files: missing"),
        ("datasets.glaive.decontaminate", {"files": ["a"], "n_gram": 5}, "did you mean ngram?"),
        ("expected_samples", {"natives": 3}, "unknown key 'natives'; did you mean native?"),
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


def test_a_licence_that_is_not_allowed_is_refused_with_its_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (root / "config.yaml").read_text(encoding="utf-8")
    text = text.replace(
        "licence: Apache-2.0\n    layout: chat_string", "licence: GPL-3\n    layout: chat_string"
    )
    path = tmp_path / "config.yaml"
    path.write_text(f"{text}\nlicences: [apache-2.0, MIT]\n", encoding="utf-8")
    number = next(n for n, line in enumerate(text.split("\n"), start=1) if "GPL-3" in line)
    monkeypatch.setenv(CONFIG_FILES_VARIABLE, str(path))
    with pytest.raises(ConfigError) as caught:
        parse_config(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert str(caught.value) == (
        f"{path}:{number} datasets.glaive.licence: saw 'GPL-3', expected one of the allowed licences: "
        "apache-2.0, MIT"
    )
    assert changed(root, licences=["apache-2.0"]).licences == ["apache-2.0"]
    with pytest.raises(ConfigError, match=r"datasets\.deepswe_kimi\.licence.*\n.*datasets\.kimi_native\.lic"):
        changed(root, licences=[])


NATIVE_CAPS = {"datasets__deepswe_kimi__samples": 72, "datasets__kimi_native__samples": 80}


def test_the_caps_must_reach_what_is_expected(root: Path) -> None:
    assert changed(root, **NATIVE_CAPS, expected_samples={"native": 152}).expected_by_kind().keys() == {
        "native"
    }
    words = (
        r"expected_samples\.native: expected 153, but the caps `samples` add up to 152: deepswe_kimi 72, kimi"
    )
    with pytest.raises(ConfigError, match=words):
        changed(root, **NATIVE_CAPS, expected_samples={"native": 153})
    with pytest.raises(ConfigError, match=r"expected at most 60, but the caps `samples` add up to \d+"):
        changed(root, **NATIVE_CAPS, expected_samples={"native": 152, "prompts": {"max": 60}})
    # A dataset without a cap gives as many as it has.
    changed(root, expected_samples={"native": 153}, datasets__kimi_native__samples=None)


def test_counts_in_words(root: Path) -> None:
    counts = [5, {"min": 5}, {"max": 5}, {"min": 4, "max": 6}, {"min": 5, "max": 5}]
    found = [CountRange.model_validate(count) for count in counts]
    assert list(map(str, found)) == ["5", "at least 5", "at most 5", "4 to 6", "5"]
    assert [[n in one for n in (3, 4, 5, 6, 7)] for one in found] == [
        [False, False, True, False, False],
        [False, False, True, True, True],
        [True, True, True, False, False],
        [False, True, True, True, False],
        [False, False, True, False, False],
    ]
    made = CountRange.model_validate(5)
    assert CountRange.model_validate_json(made.model_dump_json()) == made
    for wrong in (True, 5.0, "5", []):
        with pytest.raises(ValueError, match="CountRange"):
            CountRange.model_validate(wrong)


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
    for key, value in (("checkpoint_every", 7), ("device", "cpu"), ("processes", 2), ("tensorboard", True)):
        same = changed(root, **{f"training__{key}": value})
        assert drafter_recipe(base) == drafter_recipe(same) and report_recipe(base) == report_recipe(same)
    for key, value in (("micro_batch_tokens", 9), ("validate_every", 5), ("early_stop", 2), ("keep", "best")):
        assert drafter_recipe(base) != drafter_recipe(changed(root, **{f"training__{key}": value})), key


def test_newer_settings_leave_a_recipe_without_them_as_it_was(root: Path) -> None:
    """A finished drafter must not be trained anew because there is one more key."""
    recipe = json.loads(drafter_recipe(changed(root)))["training"]
    newer = {"micro_batch_tokens", "validate_every", "early_stop", "keep", "warm_start", "device"}
    assert not newer & recipe.keys()
    assert {"epochs", "learning_rate", "seed", "initialise"} <= recipe.keys()


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        # Selection and reading concern the prompts alone.
        ({"source__expected_rows": 96}, {"prompts"}),
        ({"media": "text_only"}, {"prompts"}),
        ({"near_duplicates": {"threshold": 0.9}}, {"prompts"}),
        ({"decontaminate": {"files": ["a.jsonl"]}}, {"prompts"}),
        # A gate repeats the check of the stages that ask it.
        ({"gates": {"max_duplicate_share": 0.5}}, {"prompts"}),
        ({"gates": {"max_empty_answer_share": 0.1}}, {"prompts"}),
        ({"gates": {"max_truncated_share": 0.5}}, {"answers"}),
        ({"gates": {"max_failed_share": 0.5}}, {"answers"}),
        ({"gates": {"max_unsupervised_share": 0.5}}, {"tokens"}),
        ({"gates": {"on_fail": "warn"}}, {"prompts", "answers", "tokens"}),
        ({"gates": {"min_kept": 2}}, {"prompts", "answers", "tokens"}),
        ({"partition": "long"}, set()),
    ],
)
def test_a_new_setting_makes_its_own_stage_stale(root: Path, change: dict[str, Any], stale: set[str]) -> None:
    def recipes(config: Config) -> dict[str, str]:
        return {
            "source": source_settings(config.datasets["glaive"].source),
            "prompts": prompts_settings(config.datasets["glaive"]),
            "answers": answering_recipe(config, "glaive"),
            "tokens": tokenizing_recipe(config, "glaive"),
            "capture": capture_recipe(config),
            "drafter": drafter_recipe(config),
        }

    before = recipes(changed(root))
    after = recipes(changed(root, **{f"datasets__glaive__{path}": value for path, value in change.items()}))
    assert {name for name in before if before[name] != after[name]} == stale


def test_every_gate_is_asked_by_some_stage(root: Path) -> None:
    made = changed(root)
    recipes = (prompts_settings(made.datasets["glaive"]), answering_recipe(made, "glaive"))
    asked = {
        name for text in (*recipes, tokenizing_recipe(made, "glaive")) for name in json.loads(text)["gates"]
    }
    assert asked == set(GateSettings.model_fields)


def test_what_is_allowed_or_expected_in_all_is_no_datasets_matter(root: Path) -> None:
    base = changed(root, **NATIVE_CAPS)
    strict = changed(root, **NATIVE_CAPS, licences=["apache-2.0"], expected_samples={"native": 152})
    for name in base.datasets:
        assert prompts_settings(base.datasets[name]) == prompts_settings(strict.datasets[name])
        assert answering_recipe(base, name) == answering_recipe(strict, name)
        assert tokenizing_recipe(base, name) == tokenizing_recipe(strict, name)
    assert drafter_recipe(base) == drafter_recipe(strict)


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
