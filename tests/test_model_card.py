"""The model card tells what the build's files hold, in the form that the hub reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import write_card
from eyrie.config import parse_config
from eyrie.eagle3.checkpoint import config_json
from eyrie.model_card import CardInputs, model_card, sglang_note
from eyrie.recipes import card_recipe, report_recipe
from eyrie.records import RecordError, write_json
from make_tiny_target import write_target
from tiny_eagle3 import tiny_config

CONFIG: dict[str, Any] = {
    "target": {"name": "tiny", "path": "target"},
    "partitions": {"short": {"max_new_tokens": 64}, "long": {"max_new_tokens": 96}},
    "model_card": {"licence": "mit"},
    "datasets": {
        "chat": {
            "source": {"hub_id": "some/chat", "revision": "a" * 40, "files": ["x.jsonl"], "format": "jsonl"},
            "licence": "Apache-2.0",
            "layout": "messages",
            "kind": "prompts",
        },
        "own": {
            "source": {"files": ["own.jsonl"], "format": "jsonl"},
            "licence": "MIT",
            "layout": "messages",
            "kind": "native",
            "native_model": "tiny",
        },
    },
}


def ledgers() -> list[dict[str, Any]]:
    made = []
    for number, (name, licence) in enumerate((("chat", "Apache-2.0"), ("own", "MIT"))):
        made.append({"stage": "prompts", "dataset": name, "in": 1200 + number, "licence": licence})
        counts = {"samples": {"train": 1000 + number}, "supervised_tokens": {"train": 45000 + number}}
        made.append({"stage": "answer_prompts", "dataset": name, **counts})
    return made


EVALUATION = {
    "acceptance_length": {"3": {"all": 1.9, "chat": 2.1, "own": None}, "5": {"all": 2.0, "chat": 2.2}},
    "acceptance_by_position": {"3": [0.5, 0.3, 0.1], "5": []},
    "prompts": {"3": {"chat": 4, "own": 3}, "5": {"chat": 2}},
    "identical_outputs": {"equal": 7, "total": 7, "dtype": "float32"},
    "warnings": ["It loops."],
}
TRAINING = {
    "counts": {"train_rows": 2001, "train_places": 90001, "epochs": 2, "steps": 9},
    "recipe": {"training": {"learning_rate": 0.0006, "keep": "best"}},
    "validation": [{"rows": 3, "acceptance_length": 1.5}],
    "kept": {"rows": 3, "acceptance_length": 1.7},
}
TARGET = {"name": "tiny", "hub_id": "some/tiny", "hub_revision": "b" * 40, "revision": "abc"}


def inputs(model_type: str = "llama", **changes: Any) -> CardInputs:
    config = parse_config(CONFIG)
    values: dict[str, Any] = {
        "recipe": json.loads(card_recipe(config)),
        "target": TARGET,
        "model_type": model_type,
        "drafter": config_json(tiny_config()),
        "training": TRAINING,
        "evaluation": EVALUATION,
        "rows": {one["dataset"]: one for one in ledgers() if one["stage"] == "prompts"},
        "samples": {one["dataset"]: one for one in ledgers() if one["stage"] != "prompts"},
    }
    return CardInputs(**values | changes)


def test_its_head_is_what_the_hub_reads() -> None:
    _, head, body = model_card(inputs()).split("---\n", 2)
    assert yaml.safe_load(head) == {
        "license": "mit",
        "base_model": "some/tiny",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "vllm", "sglang"],
        "datasets": ["some/chat"],
    }
    assert body.lstrip().startswith("# EAGLE-3 drafter for some/tiny")


def test_it_tells_target_data_figures_and_limits() -> None:
    card = model_card(inputs())
    for line in (
        "| its revision on the hub | `" + "b" * 40 + "` |",
        "| digest of its files | `abc` |",
        "| chat | some/chat at aaaaaaaaaaaa | Apache-2.0 | prompts | 1,200 | 1,000 | 45,000 |",
        "| own | local files | MIT | native | 1,201 | 1,001 | 45,001 |",
        "| held-out prompts of | 3 draft tokens | 5 draft tokens |",
        "| all | 1.90 | 2.00 |",
        "| own | - | - |",
        "By position, 3 drafted: 0.500, 0.300, 0.100.",
        "7 of 7 are equal",
        "| learning_rate | `0.0006` |",
        "is 1.700",
        "* Answers were cut at 64 tokens",
        "* It loops.",
    ):
        assert line in card, card


def test_its_commands_have_the_flags_and_ids() -> None:
    card = model_card(inputs())
    assert "vllm serve some/tiny" in card and '"method": "eagle3"' in card
    assert "--speculative-algorithm EAGLE3" in card and "--speculative-num-draft-tokens 4" in card
    assert "[1, 2, 3]" in card and "`[0, 1, 2]`" in card


def test_sglang_numbers_each_familys_layers_in_its_own_way() -> None:
    assert "to `[0, 1, 2]`" in sglang_note("llama", [1, 2, 3])
    assert "as written here" in sglang_note("kimi_k2", [2, 3, 4])
    assert sglang_note("kimi_k2", [1, 2, 3]).startswith("Not for SGLang: layer ids [1, 2, 3]")


def test_without_a_licence_it_names_none() -> None:
    recipe = inputs().recipe | {"licence": None}
    head = yaml.safe_load(model_card(inputs(recipe=recipe)).split("---\n", 2)[1])
    assert head["license"] == "other" and "license_name" in head


def test_serving_and_card_are_no_part_of_the_report() -> None:
    other = parse_config(CONFIG | {"model_card": {}, "serving": {"rounds": 7}})
    assert report_recipe(other) == report_recipe(parse_config(CONFIG))


def test_the_command_writes_the_same_card_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "target")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_json(checkpoint / "config.json", config_json(tiny_config()))
    write_json(checkpoint / "training.json", TRAINING)
    write_json(tmp_path / "evaluation.json", EVALUATION)
    write_json(tmp_path / "target.json", TARGET)
    paths = []
    for number, ledger in enumerate(ledgers()):
        paths.append(f"{number}.json")
        write_json(tmp_path / paths[-1], ledger)
    monkeypatch.chdir(tmp_path)
    command = ["write_card.py", "--checkpoint", "checkpoint", "--target", "target.json"]
    command += ["--target-path", "target", "--evaluation", "evaluation.json", "--out", "checkpoint/README.md"]
    command += ["--recipe", card_recipe(parse_config(CONFIG)), "--ledgers"]
    cards = []
    for order in (paths, paths[::-1]):
        monkeypatch.setattr(sys, "argv", [*command, *order])
        write_card.main()
        cards.append((checkpoint / "README.md").read_bytes())
    assert cards[0] == cards[1] and str(tmp_path).encode() not in cards[0]
    monkeypatch.setattr(sys, "argv", [*command, *paths[:3]])
    with pytest.raises(RecordError, match="lacks ledgers of own"):
        write_card.main()
